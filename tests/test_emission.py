"""What a model becomes in a plan folder: the same inputs give the same bytes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from compiled_models import FORMATS, Recipe, compile_recipe

ROOT = Path(__file__).parents[1]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_two_builds_and_one_in_another_process_give_the_same_bytes(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from compiled_models import *\n"
        "for f in FORMATS: compile_recipe(Recipe(format=f, soc='x'), Path(sys.argv[1]) / f)"
    )
    (tmp_path / "other").mkdir()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, str(tmp_path / "other")]
    subprocess.run(command, env=environment, timeout=120, check=True)
    for fmt in FORMATS:
        compile_recipe(Recipe(format=fmt, soc="x"), tmp_path / "a.plan")
        compile_recipe(Recipe(format=fmt, soc="x"), tmp_path / "b.plan")
        first = digests(tmp_path / "a.plan")
        assert len(first) == 6
        assert digests(tmp_path / "b.plan") == first
        assert digests(tmp_path / "other" / fmt) == first
