"""Rows of the embedding table: the same bits from the file, from memory and from the cache."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from compiled_models import Recipe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import GQA, K_BLOCKS, UNTIED, VOCAB

from lowering.quantize import ZERO_POINT
from profiles.errors import FlashError
from profiles.words import AttentionKernel, Format
from runtime import embedding, load
from runtime.embedding import EmbeddingFile, decoded_rows
from runtime.plan_folder import map_tensors, read_plan

Compiled = Callable[[Recipe], Path]
RECIPES = [
    Recipe(shape=shape, format=fmt)
    for shape in (GQA, UNTIED, K_BLOCKS)
    for fmt in (Format.F32, Format.W8A16, Format.W8A8, Format.W4)
]
PROMPT = "the and of self"


def opened(folder: Path) -> EmbeddingFile:
    plan = read_plan(folder)
    return EmbeddingFile(folder / plan.weights.path, plan.tensors)


@pytest.mark.parametrize("kept", [1, 3, VOCAB])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.shape.hidden}-{r.format}")
@given(passes=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), max_size=5))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None
)
def test_rows_are_those_of_the_mapped_table(
    compiled: Compiled,
    monkeypatch: pytest.MonkeyPatch,
    recipe: Recipe,
    kept: int,
    passes: list[list[int]],
) -> None:
    monkeypatch.setattr(embedding, "KEPT_ROWS", kept)
    folder = compiled(recipe)
    plan = read_plan(folder)
    tensors = map_tensors(folder, plan.weights, plan.tensors)
    table = opened(folder)
    for ids in passes:
        parts = [tensors[name] for name in embedding.EMBEDDING_TENSORS if name in tensors]
        expected = decoded_rows(*(part[ids] for part in parts))
        found = table.rows(ids)
        assert found.dtype == np.float32
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    table.close()


def test_blocks_have_a_scale_and_an_offset_each() -> None:
    rows = np.array([[130, 126, 129, 128]], np.uint8)
    scale, offset = np.array([[2, 3]], np.float32), np.array([[10, 20]], np.float32)
    assert decoded_rows(rows, scale, offset).tolist() == [[14, 6, 23, 20]]
    assert decoded_rows(rows, scale[0, :1]).tolist() == [[4, -4, 2, 0]]
    assert embedding.ZERO_POINT == ZERO_POINT


def test_so_many_rows_are_kept_and_those_used_latest(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "KEPT_ROWS", 2)
    table = opened(compiled(RECIPES[0]))
    table.rows([1, 2, 1, 3])
    assert list(table._kept) == [1, 3]
    table.close()


def test_rows_outside_the_table_and_a_closed_file_are_errors(compiled: Compiled) -> None:
    table = opened(compiled(RECIPES[1]))
    for token in (-1, VOCAB):
        with pytest.raises(IndexError):
            table.rows([token])
    table.close()
    table.close()
    with pytest.raises(FlashError):
        table.rows([1])


def test_no_file_is_an_error(compiled: Compiled, tmp_path: Path) -> None:
    plan = read_plan(compiled(RECIPES[1]))
    with pytest.raises(FlashError, match="cannot open"):
        EmbeddingFile(tmp_path / "nothing", plan.tensors)


@pytest.mark.parametrize("fmt", [Format.F32, Format.W8A16, Format.W8A8, Format.W4])
@pytest.mark.parametrize("kernel", AttentionKernel)
def test_decoding_touches_no_byte_of_the_file_but_the_table(
    compiled: Compiled, tmp_path: Path, kernel: AttentionKernel, fmt: Format
) -> None:
    folder = tmp_path / "x.plan"
    shutil.copytree(compiled(Recipe(format=fmt, attention=kernel)), folder)
    with load(folder) as session:
        expected = session.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
        plan = session.plan
    table = [t for t in plan.tensors if t.name in embedding.EMBEDDING_TENSORS]
    end = max(t.offset_bytes + t.size_bytes for t in table)
    with load(folder) as session:
        # A touched page beyond the end would end this process
        os.truncate(folder / plan.weights.path, end)
        found = session.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
        assert found.token_ids == expected


def test_a_file_cut_off_under_a_session_in_memory_is_an_error(
    compiled: Compiled, tmp_path: Path
) -> None:
    folder = tmp_path / "x.plan"
    shutil.copytree(compiled(Recipe()), folder)
    weights = folder / "weights.bin"
    data = weights.read_bytes()
    with load(folder) as session:
        expected = session.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids
    with load(folder) as session:
        os.truncate(weights, 0)
        with pytest.raises(FlashError, match="cut off"):
            session.generate(PROMPT, max_new_tokens=12)
        weights.write_bytes(data)
        assert session.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids == expected


def test_a_draft_model_reads_its_rows_too(compiled: Compiled, tmp_path: Path) -> None:
    folder = tmp_path / "x.plan"
    shutil.copytree(compiled(Recipe(draft_seed=0, attention=AttentionKernel.EXACT)), folder)
    with load(folder) as session:
        assert session.plan.draft is not None
        os.truncate(folder / session.plan.draft.weights.path, 0)
        assert session._draft is not None
        with pytest.raises(FlashError, match="cut off"):
            session._draft[0].embed([1])
