"""What a generation did and how long it took."""

import msgspec


class FinishedCycle(msgspec.Struct, frozen=True):
    """Counts and times of one cycle."""

    drafted: int
    accepted: int
    committed: int
    """Tokens that the cycle added: accepted + 1, less what an end cut off."""
    draft_us: float
    verify_us: float
    simulated_us: float
    """Device time by the plan's tables."""
    draft_passes: int = 0
    """Of a model that drafts, catching up included; 0 for look-ups."""
    nodes_by_depth: tuple[int, ...] = ()
    """Drafted nodes at depth 1, 2, ...; empty for a chain, which has one at each."""
    flash_bytes: int = 0
    """Of the streamed sub-layers that the verify pass used."""
    ahead_bytes: int = 0
    """Of them, what was in memory when the pass began."""
    read_us: float = 0.0
    """Time that the reader took over ``flash_bytes``, before the pass and in it."""
    exposed_io_us: float = 0.0
    """From the begin of the verify pass to the arrival of the last byte that it needs."""
    stalled_us: float = 0.0
    """Of that, the time in which the pass waited and did not compute."""

    def cut(self, kept: int) -> "FinishedCycle":
        """The cycle when only its first ``kept`` tokens belong to the generation."""
        if kept >= self.committed:
            return self
        return msgspec.structs.replace(self, committed=kept, accepted=min(self.accepted, kept))


class Stats(msgspec.Struct):
    """Running totals of one generation; times in microseconds on this machine's clock."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of the prompt, whose rows the generation before had left behind."""
    new_tokens: int = 0
    cycles: int = 0
    speculating_cycles: int = 0
    """Cycles that drafted at least one token."""
    drafted: int = 0
    accepted: int = 0
    prefill_us: float = 0.0
    draft_us: float = 0.0
    verify_us: float = 0.0
    decode_us: float = 0.0
    """From the end of the prefill to the last token."""
    simulated_us: float = 0.0
    """Decoding time on the plan's device by the plan's tables: a prediction."""
    draft_passes: int = 0
    nodes_by_depth: list[int] = msgspec.field(default_factory=list[int])
    """Drafted nodes at depth 1, 2, ..."""
    tried_by_depth: list[int] = msgspec.field(default_factory=list[int])
    """Cycles that had drafted at this depth and accepted all depths above."""
    accepted_by_depth: list[int] = msgspec.field(default_factory=list[int])
    """Cycles that accepted at this depth."""
    flash_bytes: int = 0
    """Streamed weights that verify passes used."""
    ahead_bytes: int = 0
    """Of them, what was in memory when the pass began."""
    read_us: float = 0.0
    """The reader's time over ``flash_bytes``."""
    exposed_io_us: float = 0.0
    """From the begin of each verify pass to the arrival of the last byte that it needs."""
    stalled_us: float = 0.0
    """Of that, the time in which passes waited and did not compute."""

    def add(self, cycle: FinishedCycle) -> None:
        """Count ``cycle``."""
        self.cycles += 1
        self.speculating_cycles += cycle.drafted > 0
        self.drafted += cycle.drafted
        self.accepted += cycle.accepted
        self.new_tokens += cycle.committed
        self.draft_us += cycle.draft_us
        self.verify_us += cycle.verify_us
        self.simulated_us += cycle.simulated_us
        self.draft_passes += cycle.draft_passes
        self.flash_bytes += cycle.flash_bytes
        self.ahead_bytes += cycle.ahead_bytes
        self.read_us += cycle.read_us
        self.exposed_io_us += cycle.exposed_io_us
        self.stalled_us += cycle.stalled_us
        self._add_depths(cycle)

    def _add_depths(self, cycle: FinishedCycle) -> None:
        nodes = cycle.nodes_by_depth or (1,) * cycle.drafted
        for counts in (self.nodes_by_depth, self.tried_by_depth, self.accepted_by_depth):
            counts += [0] * (len(nodes) - len(counts))
        for depth, count in enumerate(nodes):
            self.nodes_by_depth[depth] += count
            self.tried_by_depth[depth] += cycle.accepted >= depth
            self.accepted_by_depth[depth] += cycle.accepted > depth

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed on this machine, prefill excluded."""
        return per_second(self.new_tokens, self.decode_us)

    @property
    def simulated_tokens_per_s(self) -> float:
        """Predicted decoding speed on the plan's device."""
        return per_second(self.new_tokens, self.simulated_us)

    @property
    def mean_accepted(self) -> float:
        """Accepted drafted tokens per cycle."""
        return self.accepted / self.cycles if self.cycles else 0.0

    @property
    def mean_drafted(self) -> float:
        """Drafted tokens per cycle."""
        return self.drafted / self.cycles if self.cycles else 0.0


def per_second(count: float, us: float) -> float:
    """``count`` in ``us`` microseconds as a rate; 0 when no time passed."""
    return 1e6 * count / us if us > 0 else 0.0
