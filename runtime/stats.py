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
