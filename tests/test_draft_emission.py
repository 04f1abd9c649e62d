"""A draft model inside a plan: its files, and a plan that carries it."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from compiled_models import Recipe, compile_recipe, recipe_source
from tiny_models import UNTIED, tiny_source

from lowering.draft_compatibility import check_draft
from lowering.draft_emission import emit_draft
from lowering.emission import emit
from lowering.source import ModelSource
from profiles.errors import FulcrumError, InputError
from profiles.words import AttentionKernel, Format
from runtime.draft_model import DraftModelDrafter, DraftRows, open_draft
from runtime.graph_checks import check_graphs
from runtime.plan import ExecutionPlan, Formats
from runtime.plan_folder import load_plan, read_plan
from runtime.plan_writer import PlanWriter
from runtime.pricing import PriceList
from runtime.sampling import GREEDY
from runtime.tree import ROOT, TokenTree

RECIPE = Recipe(attention=AttentionKernel.EXACT)


def with_draft(
    folder: Path,
    formats: Format | Formats,
    kernel: AttentionKernel,
    source: ModelSource | None = None,
) -> tuple[Path, ExecutionPlan]:
    """A plan of a tiny target and another tiny model that drafts for it."""
    source = source or tiny_source(UNTIED, 1)
    plain = compile_recipe(RECIPE, folder / "plain.plan")
    target = folder / "with.plan"
    with PlanWriter(target) as writer:
        emit(recipe_source(RECIPE), RECIPE.format, RECIPE.context, writer, RECIPE.attention)
        draft = emit_draft(source, formats, RECIPE.context, writer, kernel)
        writer.commit(msgspec.structs.replace(plain, draft=draft))
    return target, load_plan(target)[1]


@pytest.mark.parametrize("kernel", list(AttentionKernel))
@pytest.mark.parametrize("fmt", [Format.W4, Format.W8A8, Formats(*3 * [Format.F32])], ids=str)
def test_a_plan_with_a_draft_is_read_checked_and_runs(
    tmp_path: Path, fmt: Format | Formats, kernel: AttentionKernel
) -> None:
    folder, plan = with_draft(tmp_path, fmt, kernel)
    check_graphs(folder, plan)
    assert plan.draft is not None
    files = {file.relative_to(folder).as_posix() for file in (folder / "draft").iterdir()}
    assert files == {"draft/weights.bin", "draft/layers.onnx", "draft/head.onnx"}
    model = open_draft(folder, plan.draft, 1)
    assert model.logits(model.embed([1, 2])).shape == (2, plan.draft.model.vocab)
    model.close()


@pytest.mark.parametrize("rows", [-10, 64])
def test_a_draft_may_be_padded_otherwise_than_the_target(tmp_path: Path, rows: int) -> None:
    target, draft = recipe_source(RECIPE), tiny_source(seed=1)
    vocab = draft.spec.vocab + rows
    draft.weights["embed"] = np.resize(draft.weights["embed"], (vocab, draft.spec.hidden))
    draft.spec = msgspec.structs.replace(draft.spec, vocab=vocab)
    check_draft(target, draft)
    folder, plan = with_draft(tmp_path, Format.W8A8, AttentionKernel.FUSED, draft)
    assert plan.draft is not None
    model = open_draft(folder, plan.draft, 1)
    rows_held = DraftRows(plan.draft, plan.context)
    prices = PriceList(plan.tables)
    drafter = DraftModelDrafter(model, rows_held, prices, GREEDY, plan.model.vocab)
    drafter.begin([1, plan.model.vocab - 1, 7])
    (found,) = drafter.expand(TokenTree(7), [ROOT], plan.model.vocab)
    assert set(found.ids) == set(range(min(vocab, plan.model.vocab)))
    model.close()


def test_a_draft_whose_file_was_changed_is_refused(tmp_path: Path) -> None:
    folder, _ = with_draft(tmp_path, Format.W8A8, AttentionKernel.FUSED)
    file = folder / "draft" / "weights.bin"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    read_plan(folder)
    with pytest.raises(FulcrumError, match="not the file that the plan was made with"):
        load_plan(folder)


def test_a_graph_of_the_draft_may_not_read_the_targets_weights(tmp_path: Path) -> None:
    folder, plan = with_draft(tmp_path, Format.W8A8, AttentionKernel.FUSED)
    file = folder / "draft" / "head.onnx"
    graph = onnx.load(file, load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights.bin"
    file.write_bytes(graph.SerializeToString())
    with pytest.raises(InputError, match=r"lies elsewhere than in draft/weights\.bin"):
        check_graphs(folder, plan)


def test_a_draft_that_was_written_but_not_listed_is_a_mistake(tmp_path: Path) -> None:
    plain = compile_recipe(RECIPE, tmp_path / "plain.plan")
    with PlanWriter(tmp_path / "with.plan") as writer:
        emit(recipe_source(RECIPE), RECIPE.format, RECIPE.context, writer, RECIPE.attention)
        emit_draft(tiny_source(UNTIED, 1), Format.W8A8, RECIPE.context, writer)
        with pytest.raises(FulcrumError, match="does not list the files"):
            writer.commit(plain)
