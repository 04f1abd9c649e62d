"""Running totals of a generation: counts by depth, streamed bytes, and cycles that were cut."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from runtime.stats import FinishedCycle, Stats

CHAIN = FinishedCycle(
    drafted=3, accepted=2, committed=3, draft_us=3.0, verify_us=5.0, simulated_us=7.0
)
TREE = msgspec.structs.replace(CHAIN, drafted=7, nodes_by_depth=(2, 4, 1), draft_passes=3)


def test_a_chain_counts_one_node_at_each_depth() -> None:
    stats = Stats()
    stats.add(CHAIN)
    stats.add(msgspec.structs.replace(CHAIN, drafted=1, accepted=0, committed=1))
    assert stats.nodes_by_depth == [2, 1, 1]
    assert stats.tried_by_depth == [2, 1, 1]
    assert stats.accepted_by_depth == [1, 1, 0]
    assert (stats.cycles, stats.drafted, stats.accepted, stats.new_tokens) == (2, 4, 2, 4)


def test_a_tree_counts_its_nodes_by_depth() -> None:
    stats = Stats()
    stats.add(TREE)
    stats.add(CHAIN)
    assert stats.nodes_by_depth == [3, 5, 2]
    assert stats.tried_by_depth == [2, 2, 2]
    assert stats.accepted_by_depth == [2, 2, 0]
    assert stats.draft_passes == 3


def test_a_plain_step_counts_no_depth() -> None:
    stats = Stats()
    stats.add(msgspec.structs.replace(CHAIN, drafted=0, accepted=0, committed=1))
    assert stats.nodes_by_depth == stats.tried_by_depth == stats.accepted_by_depth == []
    assert stats.speculating_cycles == 0


def test_what_was_streamed_adds_up() -> None:
    streamed = msgspec.structs.replace(
        *(CHAIN,), flash_bytes=100, ahead_bytes=40, read_us=9.0, exposed_io_us=6.0, stalled_us=2.0
    )
    stats = Stats()
    stats.add(streamed)
    stats.add(streamed)
    assert (stats.flash_bytes, stats.ahead_bytes) == (200, 80)
    assert (stats.read_us, stats.exposed_io_us, stats.stalled_us) == (18.0, 12.0, 4.0)


@given(st.lists(st.tuples(st.lists(st.integers(1, 4), max_size=5), st.integers(0, 5))))
def test_depths_never_accept_more_than_was_tried(cycles: list[tuple[list[int], int]]) -> None:
    stats = Stats()
    for nodes, wished in cycles:
        accepted = min(wished, len(nodes))
        stats.add(
            msgspec.structs.replace(
                *(CHAIN,),
                drafted=sum(nodes),
                nodes_by_depth=tuple(nodes),
                accepted=accepted,
                committed=accepted + 1,
            )
        )
    assert sum(stats.accepted_by_depth) == stats.accepted
    assert sum(stats.nodes_by_depth) == stats.drafted
    for nodes, tried, hit in zip(
        *(stats.nodes_by_depth, stats.tried_by_depth, stats.accepted_by_depth), strict=True
    ):
        assert 0 <= hit <= tried <= nodes
