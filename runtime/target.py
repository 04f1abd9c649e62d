"""The compiled target model: token ids in, passes over its layers, logits out."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from profiles.errors import IncompatibleError
from profiles.words import AttentionKernel, SubLayerId
from runtime.backends import HIDDEN, HeadSession, LayersSession, PassResult
from runtime.embedding import EMBEDDING_TENSORS, EmbeddingFile, decoded_rows
from runtime.flash import FlashCounters, FlashReader
from runtime.kv_cache import KvCache
from runtime.model_spec import ModelSpec
from runtime.plan import ExecutionPlan, Graph, GraphKind
from runtime.plan_folder import give_back_pages, map_tensors
from runtime.streamed import GraphFile, StreamedLayers, open_reader
from runtime.tree import TokenTree, tree_mask, tree_positions

Array = np.ndarray[Any, Any]

_UNPACKED = frozenset(
    {"attn_norm", "mlp_norm", "final_norm", "qkv_bias", "qk_norm"}
    | {"value_grid", "value_ungrid", "cos", "sin"}
)
"""Last parts of the names of constants that graphs read where they lie."""
BLOCKS_NDIM = 3
"""Of a matrix that is stored in blocks: [out, blocks, bytes]."""


class Target:
    """Sessions and embedding table of a plan's model.

    ``graphs`` are the plan's, ``tensors`` its mapped weights, ``attention`` the kernel that its
    layers were emitted with. One copy of the weights serves every pass: full, under a skip mask,
    or up to an exit. ``reader`` streams the sub-layers that do not stay in memory; ``embedding``
    reads rows of the table, which are looked up in ``tensors`` without it. Both are closed with
    the target.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        graphs: Iterable[Graph],
        tensors: Mapping[str, Array],
        threads: int,
        attention: AttentionKernel,
        reader: FlashReader | None = None,
        embedding: EmbeddingFile | None = None,
    ) -> None:
        self.spec = spec
        self.reader = reader
        self.attention = attention
        self.all_on = np.ones(spec.sub_layers, np.bool_)
        self._embedding = embedding
        self._tensors = tensors
        files = {
            graph.kind: GraphFile(folder / graph.artefact.path, _constants(graph, tensors))
            for graph in graphs
        }
        self._constants = [file.constants for file in files.values()]
        """They must outlive the sessions."""
        self._head = HeadSession(*files.pop(GraphKind.HEAD), threads)
        give_back_pages(tensors.values())
        if reader is None:
            self._layers = LayersSession(*files[GraphKind.LAYERS], spec, threads, attention)
        else:
            self._layers = StreamedLayers(files, spec, threads, reader)
        give_back_pages(tensors.values())

    def active(self, skipped: Iterable[SubLayerId]) -> Array:
        """Switches [2L] of a pass that leaves out ``skipped``."""
        on = self.all_on.copy()
        on[list(skipped)] = False
        return on

    def embed(self, ids: Sequence[int]) -> Array:
        """Rows of the embedding table, [n, hidden] float32."""
        if self._embedding is not None:
            return self._embedding.rows(ids)
        at = np.asarray(ids, np.int64)
        parts = (self._tensors.get(name) for name in EMBEDDING_TENSORS)
        return decoded_rows(*(part[at] for part in parts if part is not None))

    def run(
        self, hidden: Array, positions: Array, mask: Array, cache: KvCache, active: Array
    ) -> PassResult:
        """One pass with exact attention; see ``LayersSession.run``."""
        return self._layers.run(hidden, positions, mask, cache, active)

    def run_chain(
        self,
        ids: Sequence[int],
        start: int,
        cache: KvCache,
        active: Array | None = None,
        width: int | None = None,
    ) -> PassResult:
        """A chain of tokens at positions ``start`` onwards, looking at slots below ``start``.

        The pass is ``width`` rows wide (default: as many as there are tokens); rows behind the
        chain are copies of its last one that nobody looks at.
        """
        rows = width or len(ids)
        cache.reserve(start + rows)
        hidden = self.embed([*ids, *([ids[-1]] * (rows - len(ids)))])
        positions = np.minimum(np.arange(start, start + rows), start + len(ids) - 1)
        on = self.all_on if active is None else active
        if isinstance(self._layers, LayersSession) and self.attention is AttentionKernel.FUSED:
            return self._layers.run_in_place(hidden, positions, start, cache, on)
        mask = chain_mask(rows, len(ids), start, cache.capacity)
        return self.run(hidden, positions, mask, cache, on)

    def run_tree(self, tree: TokenTree, start: int, cache: KvCache, width: int) -> PassResult:
        """All nodes of a token tree with exact attention, the root at position ``start``.

        The pass is ``width`` rows wide; rows behind the tree are padding that nobody looks at.
        """
        cache.reserve(start + width)
        hidden = self.embed([*tree.tokens, *([tree.tokens[-1]] * (width - len(tree)))])
        mask = tree_mask(tree, start, cache.capacity, width)
        return self.run(hidden, tree_positions(tree, start, width), mask, cache, self.all_on)

    def run_branches(
        self, ids: Sequence[int], positions: Sequence[int], seen: Array, cache: KvCache
    ) -> PassResult:
        """A draft's pass over tokens of several branches; its rows are appended to the cache.

        ``seen`` [w, length + w] bool: the slots that a row looks at, the last w being the pass's
        own rows. No row may look at a later one.
        """
        width, end = seen.shape
        start = end - width
        cache.reserve(end)
        hidden, at = self.embed(ids), np.asarray(positions)
        mask = np.where(seen, np.float32(0), HIDDEN)
        if isinstance(self._layers, LayersSession) and self.attention is AttentionKernel.FUSED:
            result = self._layers.run_in_place(hidden, at, start, cache, self.all_on, mask)
        else:
            wide = np.full((width, cache.capacity + width), HIDDEN, np.float32)
            wide[:, :start], wide[:, cache.capacity :] = mask[:, :start], mask[:, start:]
            result = self.run(hidden, at, wide, cache, self.all_on)
        cache.commit(result.keys, result.values, slice(0, width))
        return result

    def logits(self, hidden: Array) -> Array:
        """[w, hidden] -> [w, vocab] float32."""
        found = self._head.logits(hidden)
        expected = (len(hidden), self.spec.vocab)
        if found.shape != expected or found.dtype != np.float32:
            raise IncompatibleError(
                "the head gives no logits of this model",
                found=f"{found.dtype} {list(found.shape)}",
                expected=f"float32 {list(expected)}",
                hint="make the plan again with `plan compile`",
            )
        return found

    @property
    def flash(self) -> FlashCounters:
        """What was streamed so far: nothing where all sub-layers are in memory."""
        return self.reader.counters if self.reader else FlashCounters()

    def stop(self) -> None:
        """Let a pass that waits for weights end with a ``FlashError``, from whichever thread."""
        if self.reader is not None:
            self.reader.close()

    def close(self) -> None:
        """Release the sessions, the reader and the embedding."""
        self._layers.close()
        self._head.close()
        if self._embedding is not None:
            self._embedding.close()


def open_target(
    folder: Path, plan: ExecutionPlan, threads: int, flash_rate: float | None = None
) -> Target:
    """The target of a plan; ``flash_rate`` slows its streaming to so many bytes a second."""
    with ExitStack() as opened:
        tensors = map_tensors(folder, plan.weights, plan.tensors)
        file, reader = folder / plan.weights.path, None
        if plan.residency is not None:
            reader = open_reader(file, plan.tensors, plan.residency, flash_rate)
            opened.callback(reader.close)
        embedding = EmbeddingFile(file, plan.tensors)
        opened.callback(embedding.close)
        target = Target(
            *(folder, plan.model, plan.graphs, tensors, threads, plan.numerics[0].attention),
            reader=reader,
            embedding=embedding,
        )
        opened.pop_all()
    return target


def _constants(graph: Graph, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The constants of ``graph``; those that are not packed are copies.

    So no mapped page is touched once the sessions are open: pages count as this process's memory,
    many at a time on some systems, and if the system takes them away they are read again between
    the reader's reads.
    """
    found = {name: tensors[name] for name in graph.tensors}
    return {
        name: array.copy() if _unpacked(name, found) else array for name, array in found.items()
    }


def _unpacked(name: str, tensors: Mapping[str, Array]) -> bool:
    """Whether a graph reads a constant where it lies; matrices of blocks are packed with scales."""
    matrix, _, part = name.rpartition(".")
    if part == "scale":
        return tensors[matrix].ndim != BLOCKS_NDIM
    return (part or name) in _UNPACKED


def chain_mask(width: int, chain: int, visible: int, capacity: int) -> Array:
    """Mask [width, capacity + width] of a chain of ``chain`` rows after ``visible`` slots.

    Rows past the chain are padding: they see the past and themselves.
    """
    mask = np.full((width, capacity + width), HIDDEN, np.float32)
    mask[:, :visible] = 0
    own = mask[:, capacity:]
    own[:chain, :chain][np.tri(chain, dtype=np.bool_)] = 0
    np.fill_diagonal(own, 0)
    return mask
