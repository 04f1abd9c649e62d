"""Ranks of known texts against drafting for real, one cycle after the other."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from compiled_models import Recipe
from draft_models import CONTEXT, TinyDraft
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB

from planner.calibrate import Calibration, Store, merged, read_store
from planner.corpus import Text
from planner.draft_acceptance import (
    BANDS,
    TOP,
    DraftRanks,
    DraftReading,
    TextRanks,
    band_hits,
    band_of,
    draft_digest,
    rank_counts,
    rank_paths,
)
from planner.draft_replay import (
    Drafted,
    Drafting,
    Recorded,
    Replayed,
    replay_chain,
    replay_drafting,
    replay_online,
    replay_static,
)
from planner.prompt_file import Prompt, Split
from profiles.words import AttentionKernel, Format, NodeId
from runtime.drafting import fill_chain, fill_static
from runtime.plan_cycles import Growth, TreeTemplate
from runtime.session import Session
from runtime.tree import ROOT, TokenTree

PROMPT: tuple[int, ...] = (5, 9, 200, 31, 7, 7, 90, 12)
BUSHY = TreeTemplate((0, 0, 0, 1, 1, 2, 4, 4, 7), (0, 1, 2, 0, 1, 0, 0, 1, 0))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyDraft]:
    """A draft model whose rows do not depend on the width of a pass."""
    made = TinyDraft(tmp_path_factory.mktemp("draft") / "d.plan")
    yield made
    made.model.close()


def reading(draft: TinyDraft) -> DraftReading:
    return DraftReading(draft.draft, draft.model, CONTEXT, VOCAB)


def text_of(draft: TinyDraft, wanted: Sequence[int]) -> Text:
    """A continuation whose tokens have the ``wanted`` ranks among the draft's candidates."""
    drafter, tokens = draft.drafter(), list(PROMPT)
    for rank in wanted:
        drafter.begin(tokens)
        found = drafter.expand(TokenTree(tokens[-1]), [ROOT], TOP + 1)[0]
        tokens.append(found.ids[rank])
    return Text("t", "c", len(PROMPT), tuple(tokens))


def on_chain(length: int) -> Drafting:
    def fill(tree: TokenTree, drafter: Recorded, room: int, context: int) -> Drafted:
        fill_chain(tree, drafter, min(length, room), context)
        return Drafted(tree, [NodeId(node) for node in range(len(tree))])

    return fill


def on_template(template: TreeTemplate) -> Drafting:
    def fill(tree: TokenTree, drafter: Recorded, room: int, context: int) -> Drafted:
        fill_static(tree, template, drafter, room, context)
        return Drafted(tree, [NodeId(node) for node in range(len(tree))])

    return fill


RANKS = st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 7, 8]), min_size=2, max_size=24)


@given(RANKS)
def test_one_reading_finds_the_rank_of_every_token(draft: TinyDraft, wanted: list[int]) -> None:
    text = text_of(draft, wanted)
    found = reading(draft).ranks(text)
    assert list(found.ranks) == wanted
    drafter = draft.drafter()
    for root, probabilities in zip(text.roots, found.probabilities, strict=True):
        tokens = text.tokens[: root + 1]
        drafter.begin(tokens)
        there = drafter.expand(TokenTree(tokens[-1]), [ROOT], TOP)[0]
        assert probabilities == tuple(round(p, 6) for p in there.probabilities)


@given(RANKS, st.integers(1, 9))
def test_a_chain_replayed_from_ranks_is_the_chain_that_is_drafted(
    draft: TinyDraft, wanted: list[int], length: int
) -> None:
    text = text_of(draft, wanted)
    drafted = replay_drafting(text, draft.drafter(), on_chain(length))
    assert replay_chain(reading(draft).ranks(text), length) == drafted
    assert sum(cycle.accepted + 1 for cycle in drafted) == len(wanted)


@st.composite
def templates(draw: st.DrawFn) -> TreeTemplate:
    """Trees whose nodes have siblings of all ranks below their own."""
    parents: list[int] = []
    ranks: list[int] = []
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.integers(0, len(parents)))
        rank = parents.count(parent)
        if rank < TOP:
            parents.append(parent)
            ranks.append(rank)
    return TreeTemplate(tuple(parents), tuple(ranks))


@given(RANKS, templates())
def test_a_static_tree_replayed_from_ranks_is_the_tree_that_is_drafted(
    draft: TinyDraft, wanted: list[int], template: TreeTemplate
) -> None:
    text = text_of(draft, wanted)
    drafted = replay_drafting(text, draft.drafter(), on_template(template))
    assert replay_static(reading(draft).ranks(text), template) == drafted


class Flat:
    """A verify pass costs the same whatever it holds."""

    steps = (4, 8, 16)

    def verify_us(self, _rows: int, _ahead_us: float, /) -> float:
        return 100.0


@given(RANKS)
def test_online_growth_is_replayed_with_the_drafter_at_work(
    draft: TinyDraft, wanted: list[int]
) -> None:
    text = text_of(draft, wanted)
    hits = band_hits([reading(draft).ranks(text)])
    growth = Growth(max_nodes=12, max_depth=5, branch=3, batch=4, bands=BANDS, hits=hits)
    contexts: list[int] = []

    def times(context: int) -> Flat:
        contexts.append(context)
        return Flat()

    cycles = replay_online(text, draft.drafter(), growth, times)
    assert sum(cycle.accepted + 1 for cycle in cycles) == len(wanted)
    steps = [cycle.accepted + 1 for cycle in cycles]
    assert contexts == [len(PROMPT) + sum(steps[:i]) for i in range(len(steps))]
    for cycle in cycles:
        assert cycle.accepted < cycle.rows <= 13
        assert not cycle.levels or cycle.levels[0] <= 2
        assert all(1 <= width <= 4 for width in cycle.levels[1:])


def ranks_of(*ranks: int, id: str = "t") -> TextRanks:
    return TextRanks(id, "c", ranks, tuple((0.6, 0.2, 0.1) for _ in ranks))


def test_a_replay_worked_by_hand() -> None:
    text = ranks_of(0, 1, 0, TOP, 2, 0)
    assert replay_static(text, BUSHY) == [
        # 0, then 1 below it: a leaf, and the target's own token
        Replayed(rows=10, levels=(1, 2, 1, 1), accepted=2),
        # The leaf is caught up with; two tokens have room
        Replayed(rows=7, levels=(2, 2), accepted=0),
        Replayed(rows=4, levels=(1,), accepted=1),
    ]
    assert replay_chain(ranks_of(0, 0, 0, 0), 2) == [
        Replayed(rows=3, levels=(1, 1), accepted=2),
        Replayed(rows=1, levels=(), accepted=0),
    ]


@given(st.lists(RANKS, min_size=1, max_size=4), st.integers(1, 5), st.integers(1, TOP))
def test_counts_by_depth_equal_a_walk_from_every_root(
    lists: list[list[int]], depth: int, reach: int
) -> None:
    texts = [ranks_of(*ranks) for ranks in lists]
    counts = rank_counts(texts, depth, reach)
    for level in range(depth):
        there = [
            ranks[root + level]
            for ranks in lists
            for root in range(len(ranks) - level)
            if all(rank < reach for rank in ranks[root : root + level])
        ]
        assert counts.tried[level] == len(there)
        assert counts.hits[level] == tuple(there.count(rank) for rank in range(TOP))
    assert all(0 <= rate < 1 for rate in counts.rates(0))


@given(st.lists(RANKS, min_size=1, max_size=4), templates())
def test_paths_give_the_tokens_that_a_tree_is_accepted_with(
    lists: list[list[int]], template: TreeTemplate
) -> None:
    texts = [ranks_of(*ranks) for ranks in lists]
    paths = rank_paths(texts, 20)
    nodes: list[tuple[int, ...]] = [()]
    for parent, rank in zip(template.parents, template.ranks, strict=True):
        nodes.append((*nodes[parent], rank))
    by_root = 0
    for ranks in lists:
        for root in range(len(ranks)):
            length = 0
            while root + length < len(ranks) and tuple(ranks[root : root + length + 1]) in nodes:
                length += 1
            by_root += length
    assert sum(paths.get(node, 0) for node in nodes[1:]) == by_root
    assert paths[()] == sum(map(len, lists))


def test_hits_by_band_follow_what_was_measured_and_else_what_is_likely() -> None:
    texts = [ranks_of(*([0] * 90 + [1] * 10))]
    hits = band_hits(texts)
    sure, some = band_of(BANDS, 0.6), band_of(BANDS, 0.2)
    pooled = (90 + 4 * 0.575) / 104
    assert hits[0][sure] == pytest.approx((90 + 4 * pooled) / 104)
    # Nothing of that rank was met there: as the band over all ranks
    assert hits[2][sure] == pytest.approx(pooled)
    assert hits[1][some] == pytest.approx((10 + 4 * (10 + 4 * 0.275) / 104) / 104)
    # Nothing at all was met there: as the draft says
    assert hits[0][-1] == pytest.approx(0.985)
    assert len(hits) == TOP
    assert all(0 <= share <= 1 for row in hits for share in row)


@pytest.mark.parametrize(("probability", "band"), [(0, 0), (0.0099, 0), (0.01, 1), (1, 10)])
def test_bands_begin_at_their_lower_edge(probability: float, band: int) -> None:
    assert band_of(BANDS, probability) == band


def test_a_digest_tells_drafts_apart_by_weights_format_and_kernel(tmp_path: Path) -> None:
    plain, again = (TinyDraft(tmp_path / name).draft for name in ("plain", "again"))
    others = (
        TinyDraft(tmp_path / "format", fmt=Format.W8A8),
        TinyDraft(tmp_path / "kernel", kernel=AttentionKernel.FUSED),
        TinyDraft(tmp_path / "weights", seed=1),
    )
    digests = {draft_digest(plain), *(draft_digest(other.draft) for other in others)}
    assert len(digests) == 4
    assert draft_digest(again) == draft_digest(plain)


class StoppedError(Exception):
    """Stands for Ctrl-C."""


def test_an_interrupted_calibration_goes_on_where_it_stopped(
    draft: TinyDraft, tmp_path: Path, compiled: Callable[[Recipe], Path]
) -> None:
    prompts = [
        Prompt(f"{split}{i}", "c", text, split)
        for split in Split
        for i, text in enumerate(("the cat", "a b a b", "Zebra 12"))
    ]
    stages: list[tuple[str, int]] = []

    def report(stage: str, done: int, _: int) -> None:
        if "draft model" in stage:
            stages.append((stage, done))
            if stages.count((stage, 2)) == 1 and done == 2:
                raise StoppedError

    with Session(compiled(Recipe(attention=AttentionKernel.EXACT))) as session:

        def opened() -> Calibration:
            return Calibration(
                *(session._target, session.tokens, prompts),
                context=64,
                digest="d",
                folder=tmp_path,
                report=report,
            )

        with pytest.raises(StoppedError):
            opened().draft_ranks(reading(draft), Split.SEARCH)
        assert [done for _, done in stages] == [0, 1, 2]
        stages.clear()
        stages.append(("reading along with the draft model (search)", 2))
        ranks = opened().draft_ranks(reading(draft), Split.SEARCH)
        texts = opened().texts(Split.SEARCH)
        assert ranks == [reading(draft).ranks(text) for text in texts]
        assert [done for _, done in stages] == [2, 2, 3]
        (kept,) = read_store(tmp_path / "d.json").ranks
        assert kept.texts == ranks


def test_merging_keeps_every_draft_and_of_each_what_went_further() -> None:
    short = DraftRanks("a", Split.SEARCH, [ranks_of(0)])
    longer = DraftRanks("a", Split.SEARCH, [ranks_of(0), ranks_of(1)])
    other = DraftRanks("b", Split.SEARCH, [])
    for one, two in ((short, longer), (longer, short)):
        result = merged(Store(ranks=[one]), Store(ranks=[other, two]))
        assert {(r.digest, len(r.texts)) for r in result.ranks} == {("a", 2), ("b", 0)}
