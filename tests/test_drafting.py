"""Drafters against plain passes along each path; chains and templates as they are hung on."""

from contextlib import closing

import numpy as np
import pytest
from compiled_models import CYCLE_US, DRAFT_US, NGRAM_US, Recipe
from hypothesis import given
from hypothesis import strategies as st
from scripted_drafter import ScriptedDrafter
from tiny_models import VOCAB

from profiles.words import AttentionKernel, NodeId
from runtime.drafting import NgramDrafter, SkipDrafter, fill_chain, fill_static
from runtime.kv_cache import KvCache
from runtime.ngram import NgramIndex
from runtime.plan_cycles import TreeTemplate
from runtime.plan_folder import map_tensors, read_plan
from runtime.plan_tables import CostTables
from runtime.pricing import PriceList
from runtime.sampling import GREEDY, Candidates, Sampling, ranked
from runtime.target import Target
from runtime.tree import ROOT, TokenTree

PRICES = PriceList(CostTables((), (1,), (0.0,), CYCLE_US, NGRAM_US))
RECIPE = Recipe(masks=((2, 3),), attention=AttentionKernel.EXACT)
BUSHY = TreeTemplate(parents=(0, 0, 1, 1, 2, 3), ranks=(0, 1, 0, 1, 0, 0))


def counting(path: list[int], count: int) -> Candidates:
    """Candidates 10, 11, ... after the root, then ten times more at each depth."""
    first = 10 ** (len(path) + 1)
    return Candidates(tuple(range(first, first + count)), (1.0, *([0.0] * (count - 1))))


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(NodeId(node))) for node in range(1, len(tree))}


def test_a_template_is_filled_by_ranks_in_one_pass_a_level():
    tree, drafter = TokenTree(1), ScriptedDrafter(counting)
    us = fill_static(tree, BUSHY, drafter, room_depth=9, context=5)
    assert paths(tree) == {
        *[(10,), (11,), (10, 100), (10, 101)],
        *[(11, 100), (10, 100, 1000)],
    }
    assert [len(nodes) for nodes in drafter.passes] == [1, 2, 1]
    assert us == 11 + 12 + 11


def test_a_template_is_cut_at_the_room_that_is_left():
    tree, drafter = TokenTree(1), ScriptedDrafter(counting)
    fill_static(tree, BUSHY, drafter, room_depth=2, context=5)
    assert max(tree.depths) == 2
    assert len(tree) == 6
    assert len(drafter.passes) == 2


def test_nodes_without_a_candidate_are_left_out_with_what_hangs_on_them():
    def poor(path: list[int], count: int) -> Candidates:
        return counting(path, min(count, 1))

    tree = TokenTree(1)
    fill_static(tree, BUSHY, ScriptedDrafter(poor), room_depth=9, context=5)
    assert paths(tree) == {(10,), (10, 100), (10, 100, 1000)}


def test_nothing_is_drafted_behind_an_end():
    tree, drafter = TokenTree(1), ScriptedDrafter(counting)
    fill_static(tree, BUSHY, drafter, room_depth=9, context=5, ends={10})
    assert paths(tree) == {(10,), (11,), (11, 100)}
    tree = TokenTree(1)
    drafter.begin([])
    fill_chain(tree, drafter, 5, context=5, ends={100})
    assert paths(tree) == {(10,), (10, 100)}
    assert len(drafter.passes) == 2


@given(length=st.integers(0, 6))
def test_a_chain_is_the_template_without_siblings(length):
    chain, tree = TokenTree(1), TokenTree(1)
    template = TreeTemplate(tuple(range(length)), (0,) * length)
    prices = (
        fill_chain(chain, ScriptedDrafter(counting), length, context=5),
        fill_static(tree, template, ScriptedDrafter(counting), length, context=5),
    )
    assert chain.tokens == tree.tokens
    assert chain.parents == tree.parents
    assert prices == (11 * length,) * 2


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    path=st.lists(st.integers(0, 3), max_size=5),
    low=st.integers(1, 2),
    high=st.integers(2, 4),
)
def test_lookups_continue_the_longest_suffix_first(tokens, path, low, high):
    tree, node = TokenTree(tokens[-1]), ROOT
    for token in path:
        node = tree.add(node, token)
    drafter = NgramDrafter(low, high, PRICES)
    drafter.begin(tokens[: len(tokens) // 2])
    drafter.begin(tokens)
    (found,) = drafter.expand(tree, [node], 9)
    expected: dict[int, None] = {}
    for n in range(high, low - 1, -1):
        text = tokens + path
        if n <= len(text):
            # Only what the context itself continued counts
            starts = [i for i in range(len(tokens) - n) if tokens[i : i + n] == text[-n:]]
            if starts:
                expected[tokens[starts[-1] + n]] = None
    assert found.ids == tuple(expected)
    assert len(found.probabilities) == len(found.ids)
    assert drafter.price_us(3, 100) == 3 * NGRAM_US


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_the_first_candidate_of_a_lookup_is_what_a_chain_would_begin_with(tokens):
    index = NgramIndex(1, 3)
    index.extend(tokens)
    assert list(index.continuations([]))[:1] == index.propose(1)


@pytest.fixture(scope="module")
def target(compiled):
    folder = compiled(RECIPE)
    plan = read_plan(folder)
    tensors = map_tensors(folder, plan.weights, plan.tensors)
    opened = Target(folder, plan.model, plan.graphs, tensors, 1, AttentionKernel.EXACT)
    with closing(opened):
        yield plan, opened


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, seed=4)])
def test_a_skipping_draft_says_of_each_node_what_a_chain_to_it_says(target, sampling):
    plan, model = target
    active = model.active(plan.masks[1].skipped)
    tokens = np.random.default_rng(2).integers(0, VOCAB, 21).tolist()
    cache = KvCache(model.spec, 8, 128)
    first = model.run_chain(tokens[:-1], 0, cache, width=20)
    cache.reserve(20)
    cache.commit(first.keys, first.values, slice(0, 20))
    kept = cache.keys[:, :, :20].copy()
    prices = PriceList(plan.tables)
    drafter = SkipDrafter(model, cache, active, 1, sampling, prices, most_nodes=16)
    for _ in range(2):
        tree = TokenTree(tokens[-1])
        drafter.begin(tokens)
        nodes, passes = [ROOT], 0
        while nodes:
            found = drafter.expand(tree, nodes, 3)
            for node, candidates in zip(nodes, found, strict=True):
                chain = [tree.tokens[at] for at in tree.path(node)]
                plain = KvCache(model.spec, 8, 128)
                plain.reserve(40)
                plain.keys[:, :, :20], plain.values[:, :, :20] = kept, cache.values[:, :, :20]
                plain.length = 20
                rows = model.run_chain(chain, 20, plain, active)
                logits = model.logits(rows.hidden)[-1]
                assert candidates == ranked(logits, 20 + len(chain), sampling, 3)
            passes += 1
            grown = [
                tree.add(node, token)
                for node, candidates in zip(nodes, found, strict=True)
                for token in candidates.ids[: 3 - passes]
            ]
            nodes = grown if passes < 3 else []
        assert len(tree) > 4
        drafter.accept(tree, [ROOT])
        assert cache.length == 20
        np.testing.assert_array_equal(cache.keys[:, :, :20], kept)
    assert drafter.price_us(2, 30) == DRAFT_US + CYCLE_US


def test_a_skipping_draft_refuses_tokens_that_the_cache_does_not_precede(target):
    plan, model = target
    cache = KvCache(model.spec, 8, 128)
    prices = PriceList(plan.tables)
    drafter = SkipDrafter(model, cache, model.all_on, 0, GREEDY, prices, most_nodes=4)
    with pytest.raises(ValueError, match="0 rows do not precede 2 tokens"):
        drafter.begin([1, 2])
