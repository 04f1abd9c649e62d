"""The examples of ``docs/python-api.md`` run, and its tables are complete."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from compiled_models import Recipe, compile_recipe
from tiny_models import EOS_ID

from runtime.request import Options, Request
from runtime.session import FinishReason, Generation
from runtime.stats import Stats

DOCUMENT = (Path(__file__).parents[1] / "docs" / "python-api.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)


def test_the_examples_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_recipe(Recipe(eos_ids=(EOS_ID,), seed=1, context=512), tmp_path / "my.plan")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(EXAMPLES) == 4
    for example in EXAMPLES:
        exec(compile(example, "docs/python-api.md", "exec"), names)
    reused, total = re.findall(r"(\d+) of (\d+) tokens were not", capsys.readouterr().out)[0]
    assert 0 < int(reused) < int(total)
    names["session"].close()


def test_every_option_field_and_reason_is_documented() -> None:
    fields = [*Options.__annotations__, *Generation.__struct_fields__, *FinishReason]
    assert [name for name in fields if f"`{name}`" not in DOCUMENT] == []
    assert set(Options.__annotations__) == set(Request.__struct_fields__)
    stats = {field.name for field in msgspec.structs.fields(Stats)}
    named = re.search(r"counts and times: (.*?), \.\.\.", DOCUMENT)
    assert named is not None
    assert set(re.findall("`(.*?)`", named[1])) <= stats | {"tokens_per_s"}
