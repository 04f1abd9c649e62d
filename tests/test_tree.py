"""Token trees: ancestry, positions and walks against slow references; chains among them."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.words import NodeId
from runtime.backends import HIDDEN
from runtime.target import chain_mask
from runtime.tree import ROOT, TokenTree, follow, rows_mask, tree_mask, tree_positions


@st.composite
def trees(draw: st.DrawFn, most: int = 24) -> TokenTree:
    """Few tokens, so that a parent often has one already."""
    tree = TokenTree(draw(st.integers(0, 5)))
    for _ in range(draw(st.integers(0, most))):
        parent, token = NodeId(draw(st.integers(0, len(tree) - 1))), draw(st.integers(0, 5))
        if tree.child(parent, token) is None:
            tree.add(parent, token)
    return tree


def is_ancestor(tree: TokenTree, above: int, node: int) -> bool:
    while node > above:
        node = tree.parents[node]
    return node == above


@given(tree=trees(), visible=st.integers(0, 7), spare=st.integers(0, 5), padding=st.integers(0, 4))
def test_a_row_sees_the_past_its_ancestors_and_itself(tree, visible, spare, padding):
    capacity, width = visible + spare, len(tree) + padding
    mask = tree_mask(tree, visible, capacity, width)
    assert mask.shape == (width, capacity + width)
    assert mask.dtype == np.float32
    for row in range(width):
        for column in range(capacity + width):
            own = column - capacity
            if own < 0:
                seen = column < visible
            elif row < len(tree) and own < len(tree):
                seen = is_ancestor(tree, own, row)
            else:
                seen = own == row
            assert mask[row, column] == (0 if seen else HIDDEN)


@given(tree=trees(), start=st.integers(0, 1000), padding=st.integers(0, 4))
def test_a_position_is_the_roots_plus_the_depth(tree, start, padding):
    positions = tree_positions(tree, start, len(tree) + padding)
    steps = [len(tree.path(NodeId(node))) - 1 for node in range(len(tree))]
    assert positions.tolist() == [start + n for n in steps + steps[-1:] * padding]


@given(
    length=st.integers(0, 9),
    visible=st.integers(0, 7),
    spare=st.integers(0, 5),
    padding=st.integers(0, 4),
)
def test_the_mask_of_a_tree_without_siblings_is_that_of_a_chain(length, visible, spare, padding):
    tree = TokenTree(3)
    for token in range(length):
        tree.add(NodeId(token), token)
    width, capacity = length + 1 + padding, visible + spare
    expected = chain_mask(width, length + 1, visible, capacity)
    np.testing.assert_array_equal(tree_mask(tree, visible, capacity, width), expected)


@given(tree=trees(), target=st.lists(st.integers(0, 5), min_size=25, max_size=25))
def test_a_walk_takes_the_child_that_the_target_says_and_ends_with_the_targets_own_token(
    tree, target
):
    asked: list[int] = []

    def chosen(node: NodeId) -> int:
        asked.append(node)
        return target[node]

    path, tokens = follow(tree, chosen)
    assert asked == path
    assert path[0] == ROOT
    for parent, node in itertools.pairwise(path):
        assert tree.parents[node] == parent
        assert tree.tokens[node] == target[parent]
    assert tokens == [target[node] for node in path]
    assert tree.child(path[-1], tokens[-1]) is None


@given(tree=trees(), data=st.data())
def test_a_subtree_keeps_tokens_depths_and_parents(tree, data):
    nodes = [ROOT]
    for node in range(1, len(tree)):
        if tree.parents[node] in nodes and data.draw(st.booleans()):
            nodes.append(NodeId(node))
    part = tree.subtree(nodes)
    assert len(part) == len(nodes)
    for place, node in enumerate(nodes):
        assert part.path_tokens(NodeId(place)) == tree.path_tokens(node)
        assert nodes[part.parents[place]] == tree.parents[node]


def test_a_parent_has_a_token_once_and_other_parents_may_have_it_too():
    tree = TokenTree(7)
    first = tree.add(ROOT, 4)
    assert tree.add(first, 4) == 2
    assert tree.children(ROOT) == [first]
    with pytest.raises(ValueError, match="token 4 already"):
        tree.add(ROOT, 4)


def test_rows_of_a_drafting_pass_see_their_own_scratch_slots_and_not_each_other():
    mask = rows_mask([[2, 4], []], visible=2, capacity=6, width=3)
    seen = [np.flatnonzero(row == 0).tolist() for row in mask]
    assert seen == [[0, 1, 2, 4, 6], [0, 1, 7], [0, 1, 8]]
