"""A model that drafts: its trees beside chains that are drafted alone, and its rows over cycles."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from draft_models import CONTEXT, TinyDraft
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import GQA, QWEN2, VOCAB, TinyShape

from profiles.words import AttentionKernel, Format, NodeId
from runtime.draft_model import CATCH_UP_ROWS, DraftModelDrafter, DraftRows
from runtime.sampling import GREEDY, Candidates, Sampling, choose
from runtime.tree import ROOT, TokenTree

PROMPT = [5, 9, 200, 31, 7, 7, 90, 12, 44, 3, 150, 61, 8, 19, 20]
NOISY = Sampling(temperature=0.8, top_k=20, seed=7)
EXACT, FUSED = AttentionKernel.EXACT, AttentionKernel.FUSED
Made = Callable[..., TinyDraft]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Tiny draft models, each written once."""
    root = tmp_path_factory.mktemp("drafts")
    drafts: dict[object, TinyDraft] = {}

    def of(
        shape: TinyShape = GQA, fmt: Format = Format.W8A16, kernel: AttentionKernel = EXACT
    ) -> TinyDraft:
        key = shape, fmt, kernel
        if key not in drafts:
            drafts[key] = TinyDraft(root / f"{len(drafts)}.plan", *key)
        return drafts[key]

    yield of
    for draft in drafts.values():
        draft.model.close()


def alone(draft: TinyDraft, tokens: Sequence[int], count: int, sampling: Sampling) -> Candidates:
    """Candidates for what follows ``tokens``, by a drafter that has seen nothing before."""
    drafter = draft.drafter(sampling=sampling)
    drafter.begin(tokens)
    return drafter.expand(TokenTree(tokens[-1]), [ROOT], count)[0]


def chain(drafter: DraftModelDrafter, tokens: Sequence[int], length: int) -> TokenTree:
    """A drafted chain; its last node is not expanded."""
    drafter.begin(tokens)
    tree, node = TokenTree(tokens[-1]), ROOT
    for _ in range(length):
        node = tree.add(node, drafter.expand(tree, [node], 1)[0].ids[0])
    return tree


def grow(
    drafter: DraftModelDrafter, tokens: Sequence[int], levels: Sequence[Sequence[int]]
) -> tuple[TokenTree, dict[NodeId, Candidates]]:
    """A tree whose levels expand the nodes of the given indices, all of a level in one pass."""
    drafter.begin(tokens)
    tree, found = TokenTree(tokens[-1]), dict[NodeId, Candidates]()
    frontier = [ROOT]
    for picks in levels:
        chosen = sorted({frontier[pick % len(frontier)] for pick in picks})
        frontier = []
        for node, candidates in zip(chosen, drafter.expand(tree, chosen, 3), strict=True):
            found[node] = candidates
            frontier += [tree.add(node, token) for token in candidates.ids]
    return tree, found


def same(one: Candidates, other: Candidates, tolerance: float = 0.0) -> bool:
    return one.ids == other.ids and np.allclose(
        one.probabilities, other.probabilities, rtol=tolerance, atol=0
    )


LEVELS = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "sampled"])
@given(levels=LEVELS)
def test_every_node_proposes_what_its_path_proposes_as_a_chain_alone(
    made: Made, sampling: Sampling, levels: list[list[int]]
) -> None:
    draft = made()
    tree, found = grow(draft.drafter(sampling=sampling), PROMPT, levels)
    for node, candidates in found.items():
        expected = alone(draft, [*PROMPT, *tree.path_tokens(node)], 3, sampling)
        assert same(candidates, expected)


@pytest.mark.parametrize("fmt", [Format.F32, Format.W8A16, Format.W8A8, Format.W4])
@pytest.mark.parametrize("shape", [GQA, QWEN2], ids=["llama", "qwen2"])
def test_the_fused_kernel_hides_siblings_from_one_another(
    made: Made, shape: TinyShape, fmt: Format
) -> None:
    draft = made(shape, fmt, FUSED)
    tree, found = grow(draft.drafter(), PROMPT, [[0], [0, 1, 2], [1, 3, 5, 8], [0, 4, 7]])
    for node, candidates in found.items():
        expected = alone(draft, [*PROMPT, *tree.path_tokens(node)], 3, GREEDY)
        assert candidates.ids[0] == expected.ids[0]
        assert np.allclose(candidates.probabilities, expected.probabilities, rtol=0.02)


@given(
    levels=LEVELS,
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_rows_of_an_accepted_path_are_those_of_the_text(
    made: Made, levels: list[list[int]], seed: int, lengths: list[int]
) -> None:
    draft, random = made(), np.random.default_rng(seed)
    rows, tokens = draft.rows(), list(PROMPT)
    drafter = draft.drafter(rows)
    for length in lengths:
        tree, _ = grow(drafter, tokens, levels)
        path = tree.path(NodeId(int(random.integers(len(tree)))))[: length + 1]
        drafter.accept(tree, path)
        assert rows.tokens == [*tokens, *tree.path_tokens(path[-1])][: len(rows.tokens)]
        assert rows.cache.length == len(rows.tokens) >= len(tokens)
        tokens += [*tree.path_tokens(path[-1]), int(random.integers(VOCAB))]
    check_rows(draft, rows)


def check_rows(draft: TinyDraft, rows: DraftRows) -> None:
    """The cache holds, bit by bit, what reading its tokens alone would have put there."""
    fresh, count = draft.drafter(other := draft.rows()), len(rows.tokens)
    fresh.begin([*rows.tokens, 1])
    fresh.expand(TokenTree(1), [ROOT], 1)
    for ours, theirs in (
        (rows.cache.keys, other.cache.keys),
        (rows.cache.values, other.cache.values),
    ):
        assert np.array_equal(ours[:, :, :count], theirs[:, :, :count])


@pytest.mark.parametrize("kernel", [EXACT, FUSED])
@pytest.mark.parametrize("accepted", range(5))
def test_after_any_accepted_length_a_chain_goes_on_as_if_nothing_had_been_drafted(
    made: Made, kernel: AttentionKernel, accepted: int
) -> None:
    draft = made(kernel=kernel)
    drafter = draft.drafter(rows := draft.rows())
    tree = chain(drafter, PROMPT, 4)
    drafter.accept(tree, tree.path(NodeId(accepted)))
    # The last node of a chain is not expanded, so it has no row
    assert len(rows.tokens) == len(PROMPT) + min(accepted, 3)
    tokens = [*PROMPT, *tree.path_tokens(NodeId(accepted)), 77]
    assert chain(drafter, tokens, 4).tokens == chain(draft.drafter(), tokens, 4).tokens


@pytest.mark.parametrize("kernel", [EXACT, FUSED])
@pytest.mark.parametrize("behind", [0, 1, CATCH_UP_ROWS, CATCH_UP_ROWS + 1, 100])
def test_it_catches_up_with_what_was_committed_without_it(
    made: Made, kernel: AttentionKernel, behind: int
) -> None:
    draft = made(kernel=kernel)
    drafter = draft.drafter(rows := draft.rows())
    tree = chain(drafter, PROMPT, 2)
    drafter.accept(tree, [ROOT])
    later = [*PROMPT, *np.random.default_rng(behind).integers(0, VOCAB, behind + 1).tolist()]
    assert chain(drafter, later, 3).tokens == chain(draft.drafter(), later, 3).tokens
    assert rows.tokens == later


def test_a_tree_that_was_never_settled_leaves_nothing_behind(made: Made) -> None:
    draft = made()
    drafter = draft.drafter(rows := draft.rows())
    chain(drafter, PROMPT, 4)
    chain(drafter, [*PROMPT, 3, 1, 4], 4)
    tree = chain(drafter, PROMPT[:6], 4)
    assert tree.tokens == chain(draft.drafter(), PROMPT[:6], 4).tokens
    drafter.accept(tree, [ROOT])
    assert rows.tokens == PROMPT[:6]
    check_rows(draft, rows)


def test_the_next_generation_computes_only_what_it_does_not_share(made: Made) -> None:
    draft = made()
    rows = draft.rows()
    first = draft.drafter(rows)
    first.accept(chain(first, PROMPT, 2), [ROOT])
    before = rows.cache.keys[:, :, :10].copy()
    rows.cache.keys[:, :, 10:] = 1e3
    second = draft.drafter(rows, NOISY)
    tokens = [*PROMPT[:10], 1, 2, 3]
    second.begin(tokens)
    assert rows.tokens == PROMPT[:10]
    assert np.array_equal(rows.cache.keys[:, :, :10], before)
    found = second.expand(TokenTree(3), [ROOT], 2)[0]
    assert found == alone(draft, tokens, 2, NOISY)


@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "sampled"])
def test_the_same_model_in_the_same_numerics_drafts_the_text_itself(
    made: Made, sampling: Sampling
) -> None:
    draft = made()
    drafter, tokens, cycles = draft.drafter(sampling=sampling), list(PROMPT), 0
    while len(tokens) < 60:
        tree = chain(drafter, tokens, 4)
        said = [plain(draft, [*tokens, *tree.tokens[1 : 1 + i]], sampling) for i in range(5)]
        assert tree.tokens[1:] == said[:4]
        drafter.accept(tree, tree.path(NodeId(4)))
        tokens += said
        cycles += 1
    assert cycles == 9


def plain(draft: TinyDraft, tokens: Sequence[int], sampling: Sampling) -> int:
    """The next token by the model's own plain decoding."""
    cache = draft.rows().cache
    result = draft.model.run_chain(tokens, 0, cache)
    logits = draft.model.logits(result.hidden[-1:])
    return int(choose(logits, [len(tokens)], sampling)[0])


def test_ids_that_the_target_does_not_have_are_never_proposed(made: Made) -> None:
    draft = made()
    narrow = draft.drafter(vocab=40)
    narrow.begin(PROMPT[-2:])
    found = narrow.expand(TokenTree(PROMPT[-1]), [ROOT], 40)[0]
    assert sorted(found.ids) == list(range(40))


def test_ids_that_the_draft_does_not_have_are_read_as_some_other(made: Made) -> None:
    draft = made()
    wide = draft.drafter(vocab=VOCAB + 50)
    wide.begin([*PROMPT, VOCAB + 7, 3])
    found = wide.expand(TokenTree(3), [ROOT], 2)[0]
    assert same(found, alone(draft, [*PROMPT, 0, 3], 2, GREEDY))


def test_a_context_that_is_full_still_has_room_for_a_tree(made: Made) -> None:
    draft = made()
    drafter = draft.drafter()
    tokens = np.random.default_rng(0).integers(0, VOCAB, CONTEXT).tolist()
    tree, _ = grow(drafter, tokens, [[0], [0, 1, 2], list(range(9)), list(range(12))])
    drafter.accept(tree, tree.path(NodeId(len(tree) - 1)))


def test_prices_are_those_of_the_plan(made: Made) -> None:
    drafter = made().drafter()
    assert drafter.price_us(1, 64) == 5 + 2
    assert drafter.price_us(3, 96) == 7.5 + 2
