"""Tiny draft models on disk, and drafters over them."""

from pathlib import Path
from typing import Any

from tiny_models import GQA, TinyShape, tiny_source

from lowering.draft_emission import emit_draft
from profiles.words import AttentionKernel, Format
from runtime.draft_model import DraftModelDrafter, DraftRows, open_draft
from runtime.plan import DraftModel
from runtime.plan_tables import CostTables, PassKind, PassTable
from runtime.plan_writer import PlanWriter
from runtime.pricing import PriceList
from runtime.sampling import GREEDY, Sampling
from runtime.target import Target

CONTEXT = 256
PROPOSE = PassTable(PassKind.PROPOSE, 0, (1, 4, 16), (64, 128), ((5, 6), (7, 8), (20, 22)))
PRICES = PriceList(CostTables((PROPOSE,), (1,), (1.0,), 2.0, 0.0))


class TinyDraft:
    """A draft model written to ``folder`` as into a plan, and opened from there."""

    def __init__(
        self,
        folder: Path,
        shape: TinyShape = GQA,
        fmt: Format = Format.W8A16,
        kernel: AttentionKernel = AttentionKernel.EXACT,
        seed: int = 0,
    ) -> None:
        with PlanWriter(folder) as writer:
            self.draft: DraftModel = emit_draft(
                tiny_source(shape, seed), fmt, CONTEXT, writer, kernel
            )
            writer.folder.rename(folder)
        self.folder = folder
        self.model: Target = open_draft(folder, self.draft, 1)

    def rows(self) -> DraftRows:
        """With nothing in them."""
        return DraftRows(self.draft, CONTEXT)

    def drafter(
        self, rows: DraftRows | None = None, sampling: Sampling = GREEDY, **changes: Any
    ) -> DraftModelDrafter:
        """A drafter for one generation."""
        vocab = changes.get("vocab", self.draft.model.vocab)
        return DraftModelDrafter(self.model, rows or self.rows(), PRICES, sampling, vocab)
