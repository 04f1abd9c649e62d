"""Online growth: best cuts by brute force, limits as properties, batching and reading ahead."""

import bisect
import itertools
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_drafter import ScriptedDrafter

from profiles.words import NodeId
from runtime.feedback import Feedback
from runtime.growth import Grown, grow
from runtime.plan_cycles import Growth
from runtime.sampling import Candidates
from runtime.tree import ROOT, TokenTree

BANDS = (0.0, 0.1, 0.4, 0.8)
GROWTH = Growth(
    max_nodes=31,
    max_depth=8,
    branch=3,
    batch=4,
    bands=BANDS,
    hits=((0.05, 0.2, 0.6, 0.95), (0.05, 0.15, 0.3, 0.3), (0.02, 0.1, 0.1, 0.1)),
)


class StepTimes(msgspec.Struct):
    """A verify pass that costs by padded width, and less the longer the flash has read."""

    steps: tuple[int, ...] = (1, 4, 8, 16, 32)
    base_us: float = 100.0
    row_us: float = 2.0
    flash_us: float = 0.0

    def verify_us(self, rows: int, ahead_us: float, /) -> float:
        width = self.steps[bisect.bisect_left(self.steps, rows)]
        return max(self.base_us + self.row_us * width, self.flash_us - ahead_us)


def hashed(seed: int, branch: int = 3):
    """Candidates that depend on nothing but the seed and the path."""

    def script(path: list[int], count: int) -> Candidates:
        draw = zlib.crc32(bytes([seed, *path]))
        shares = [0.5, 0.85, 0.97, 0.3][draw % 4]
        probabilities = [shares, *((1 - shares) / 2**i for i in range(1, branch))]
        return Candidates(tuple(range(10, 10 + count)), tuple(probabilities[:count]))

    return script


def grown(
    drafter: ScriptedDrafter, times: StepTimes, growth: Growth = GROWTH, feedback=None, **options
) -> tuple[TokenTree, Grown]:
    tree = TokenTree(1)
    found = grow(
        *(tree, growth, drafter, times, feedback or Feedback(growth)),
        **{"room_depth": 99, "context": 50} | options,
    )
    return tree, found


growths = st.builds(
    msgspec.structs.replace,
    st.just(GROWTH),
    max_nodes=st.integers(0, 31),
    max_depth=st.integers(0, 6),
    branch=st.integers(1, 3),
    batch=st.integers(1, 5),
)
all_times = st.builds(
    StepTimes,
    base_us=st.sampled_from([20.0, 100.0, 400.0]),
    row_us=st.sampled_from([0.0, 2.0, 10.0]),
    flash_us=st.sampled_from([0.0, 900.0]),
)
drafters = st.builds(
    lambda seed, pass_us, row_us: ScriptedDrafter(hashed(seed), pass_us, row_us),
    *(st.integers(0, 255), st.sampled_from([1.0, 10.0, 60.0]), st.sampled_from([0.0, 1.0, 30.0])),
)


@settings(max_examples=60)
@given(growth=growths, times=all_times, drafter=drafters, room=st.integers(0, 8))
def test_growth_stays_within_its_envelope_and_the_room(growth, times, drafter, room):
    tree, found = grown(drafter, times, growth, room_depth=room)
    verified = found.verified
    assert len(verified) - 1 <= growth.max_nodes
    assert max(tree.depths) <= min(growth.max_depth, room)
    assert all(len(nodes) <= growth.batch for nodes in drafter.passes)
    assert sum(map(len, drafter.passes)) <= growth.max_nodes, "a drafter has no more scratch"
    assert all(len(verified.children(NodeId(n))) <= growth.branch for n in range(len(verified)))
    assert found.nodes == sorted(set(found.nodes))
    assert [tree.tokens[n] for n in found.nodes] == verified.tokens
    spent = sum(drafter.price_us(len(nodes), 0) for nodes in drafter.passes)
    assert found.draft_us == pytest.approx(spent)


@settings(max_examples=60)
@given(growth=growths, times=all_times, drafter=drafters)
def test_the_same_draft_grows_the_same_tree(growth, times, drafter):
    first = grown(drafter, times, growth)[1]
    drafter.begin([])
    again = grown(drafter, times, growth)[1]
    assert first.verified.tokens == again.verified.tokens
    assert first.verified.parents == again.verified.parents
    assert first[1:] == again[1:]


@settings(max_examples=60)
@given(
    times=all_times,
    drafter=drafters,
    branch=st.integers(1, 3),
    depth=st.integers(1, 2),
)
def test_no_other_choice_of_what_was_drafted_commits_more_per_time(times, drafter, branch, depth):
    growth = msgspec.structs.replace(GROWTH, branch=branch, max_depth=depth)
    tree, found = grown(drafter, times, growth)
    feedback = Feedback(growth)
    nodes: list[tuple[int, ...]] = []
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for batch in drafter.passes:
        for node in batch:
            path = tuple(tree.path_tokens(node))
            candidates = drafter.script(list(path), branch)
            left = 1.0
            for rank, (token, p) in enumerate(zip(*candidates, strict=True)):
                share = min(feedback.calibrated(rank, p), left)
                left -= share
                reach[(*path, token)] = reach[path] * share
                nodes.append((*path, token))
    best = 0.0
    for size in range(min(len(nodes), 12) + 1):
        for chosen in itertools.combinations(nodes, size):
            if all(path[:-1] == () or path[:-1] in chosen for path in chosen):
                gain = 1 + sum(reach[path] for path in chosen)
                us = found.draft_us + times.verify_us(size + 1, found.draft_us)
                best = max(best, gain / us)
    us = found.draft_us + times.verify_us(len(found.verified), found.draft_us)
    assert found.expected_tokens / us >= best * (1 - 1e-6)
    kept = [tuple(found.verified.path_tokens(NodeId(n))) for n in range(len(found.verified))]
    assert found.expected_tokens == pytest.approx(sum(reach[path] for path in kept))


def sure(path: list[int], count: int) -> Candidates:
    """Always nearly certain of the first one."""
    return Candidates((10 + len(path), 30, 31)[:count], (0.9, 0.06, 0.03)[:count])


def vague(_path: list[int], count: int) -> Candidates:
    return Candidates((10, 30, 31)[:count], (0.4, 0.3, 0.2)[:count])


def test_a_width_step_is_filled_where_rows_inside_it_are_free():
    _, found = grown(ScriptedDrafter(sure, 10.0), StepTimes())
    assert len(found.verified) in StepTimes().steps


def test_a_sure_draft_goes_deeper_than_a_vague_one():
    deep = grown(ScriptedDrafter(sure, 20.0), StepTimes())[1].verified
    flat = grown(ScriptedDrafter(vague, 20.0), StepTimes())[1].verified
    assert max(deep.depths) > max(flat.depths)


def test_nothing_is_drafted_where_a_pass_takes_longer_than_a_plain_step():
    drafter = ScriptedDrafter(sure, pass_us=300.0)
    _, found = grown(drafter, StepTimes())
    assert drafter.passes == []
    assert len(found.verified) == 1
    assert found.expected_tokens == 1


def test_drafting_is_nearly_free_while_the_flash_reads():
    still = ScriptedDrafter(vague, pass_us=60.0)
    grown(still, StepTimes(base_us=20.0))
    reading = ScriptedDrafter(vague, pass_us=60.0)
    grown(reading, StepTimes(base_us=20.0, flash_us=900.0))
    assert len(reading.passes) > len(still.passes)


def test_nodes_are_batched_where_rows_are_cheap_and_not_where_they_cost_a_pass_each():
    times = StepTimes(base_us=400.0)
    cheap, dear = ScriptedDrafter(vague, 20.0, 0.1), ScriptedDrafter(vague, 0.0, 20.0)
    grown(cheap, times)
    grown(dear, times)
    assert max(map(len, cheap.passes)) > 1
    assert max(map(len, dear.passes)) == 1


def test_nothing_follows_an_end():
    tree, _ = grown(ScriptedDrafter(sure, 1.0), StepTimes(), ends={11})
    ended = [n for n in range(len(tree)) if tree.tokens[n] == 11]
    assert ended
    assert all(not tree.children(NodeId(n)) for n in ended)


def test_no_more_nodes_are_expanded_than_may_be_verified():
    """The drafter has scratch for no more, though a node may be ousted after it was expanded."""

    bands = (0.0, 0.116, 0.426, 0.458, 0.99)

    def ousting(path: list[int], count: int) -> Candidates:
        shares = (0.99, 0.0, 0.0) if path else (0.458, 0.426, 0.116)
        return Candidates((10, 11, 12)[:count], shares[:count])

    growth = Growth(5, 6, branch=3, batch=4, bands=bands, hits=(bands,) * 3)
    drafter = ScriptedDrafter(ousting, pass_us=1.0, row_us=0.0)
    grown(drafter, StepTimes(steps=tuple(range(1, 7)), base_us=1000.0, row_us=0.0), growth)
    assert sum(map(len, drafter.passes)) == 5


def test_a_drafter_without_candidates_leaves_a_plain_step():
    drafter = ScriptedDrafter(lambda _path, _count: Candidates((), ()))
    _, found = grown(drafter, StepTimes())
    assert len(found.verified) == 1
    assert drafter.passes == [[ROOT]]


def fed(feedback: Feedback, cycles: int, *, hit: bool, rank: int = 0, chance: float = 0.6) -> None:
    tree = TokenTree(1)
    node = tree.add(ROOT, 5)
    for _ in range(cycles):
        feedback.observe(tree, [0, rank], [1.0, chance], [ROOT, node] if hit else [ROOT])


def test_what_is_met_moves_the_odds_within_bounds():
    up, down = Feedback(GROWTH), Feedback(GROWTH)
    assert up.corrected(0, 0.6) == pytest.approx(0.6)
    fed(up, 200, hit=True)
    fed(down, 200, hit=False)
    assert up.factor(0) == 4.0
    assert down.factor(0) == 0.25
    assert up.corrected(0, 0.6) == pytest.approx(6 / 7)
    assert down.corrected(0, 0.6) == pytest.approx(3 / 11)
    assert up.factor(1) == 1
    assert [up.corrected(0, share) for share in (0.0, 1.0)] == [0.0, 1.0]


@given(met=st.lists(st.booleans(), max_size=80), chance=st.floats(0.05, 0.95))
def test_a_correction_never_leaves_the_unit_interval_nor_changes_the_order(met, chance):
    feedback = Feedback(GROWTH)
    for hit in met:
        fed(feedback, 1, hit=hit, chance=chance)
    shares = [feedback.corrected(0, at / 20) for at in range(21)]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_acceptance_as_calibrated_corrects_nothing():
    feedback = Feedback(GROWTH)
    for _ in range(40):
        fed(feedback, 3, hit=True)
        fed(feedback, 2, hit=False)
    assert feedback.factor(0) == pytest.approx(1, abs=0.2)


def test_without_drafts_the_calibration_is_believed_again():
    feedback = Feedback(GROWTH)
    fed(feedback, 200, hit=False)
    for _ in range(200):
        feedback.observe(TokenTree(1), [0], [1.0], [ROOT])
    assert feedback.factor(0) == pytest.approx(1, abs=0.01)


def test_children_of_rejected_nodes_tell_nothing():
    tree = TokenTree(1)
    first = tree.add(ROOT, 5)
    tree.add(first, 6)
    one, both = Feedback(GROWTH), Feedback(GROWTH)
    fed(one, 1, hit=False)
    both.observe(tree, [0, 0, 0], [1.0, 0.6, 0.6], [ROOT])
    assert one.factor(0) == both.factor(0)


def test_bad_luck_makes_smaller_trees():
    feedback = Feedback(GROWTH)
    before = grown(ScriptedDrafter(sure, 20.0), StepTimes(), feedback=feedback)[1]
    fed(feedback, 60, hit=False, chance=0.95)
    after = grown(ScriptedDrafter(sure, 20.0), StepTimes(), feedback=feedback)[1]
    assert max(after.verified.depths) < max(before.verified.depths)


def test_drafting_that_did_not_pay_is_tried_again():
    feedback, passes = Feedback(GROWTH), list[int]()
    poor = ScriptedDrafter(lambda _path, _count: Candidates((10,), (0.05,)), pass_us=70.0)
    for _ in range(200):
        poor.begin([])
        _, found = grown(poor, StepTimes(), feedback=feedback)
        feedback.observe(found.verified, found.ranks, found.chances, [ROOT])
        passes.append(len(poor.passes))
    tried = [at for at, count in enumerate(passes) if count]
    assert 0 < sum(at >= 100 for at in tried) < 25


def test_bands_include_their_lower_edge_and_ranks_beyond_repeat_the_last():
    feedback = Feedback(GROWTH)
    assert feedback.calibrated(0, 0.1) == 0.2
    assert feedback.calibrated(0, 0.0999) == 0.05
    assert feedback.calibrated(0, 1.0) == 0.95
    assert feedback.calibrated(7, 0.0) == 0.02
