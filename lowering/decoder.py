"""The numeric reference: a decoder in float32 torch, as passes over a key-value cache.

A pass maps hidden rows, positions, a mask over slots and a sub-layer mask to hidden rows. Drafts,
exits, tree verification, prefill and plain decoding are all such passes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from lowering.source import ModelSource, stored_name
from profiles.words import LayerId, SubLayerId, SubLayerKind, sub_layer_id
from runtime.model_spec import ModelSpec

Linear = Callable[[str, Tensor], Tensor]
"""(canonical weight name, x [w, in]) -> [w, out]."""
Active = AbstractSet[SubLayerId] | Sequence[bool]
"""The sub-layers that a pass computes: their ids, or one flag for each of the 2L."""


class KeyValues(msgspec.Struct, frozen=True):
    """T slots of a cache: ``keys`` (already rotated) and ``values`` [L, T, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor

    @property
    def slots(self) -> int:
        """T."""
        return self.keys.shape[1]

    @classmethod
    def empty(cls, spec: ModelSpec) -> "KeyValues":
        """A cache of no slots."""
        return cls.zeros(spec, 0)

    @classmethod
    def zeros(cls, spec: ModelSpec, slots: int) -> "KeyValues":
        """A cache of ``slots`` slots, all zero."""
        shape = (spec.layers, slots, spec.kv_heads, spec.head_dim)
        return cls(torch.zeros(shape), torch.zeros(shape))

    def extended(self, keys: Tensor, values: Tensor) -> "KeyValues":
        """A new cache with the rows [L, w, kv_heads, head_dim] of a pass as further slots."""
        return KeyValues(torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1))


class Weights(Mapping[str, Tensor]):
    """Float32 tensors of a source by canonical name, each loaded at first use and kept once."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._loaded: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        name = stored_name(name, self._source.spec.tied_head)
        if name not in self._loaded:
            self._loaded[name] = torch.from_numpy(self._source.tensor(name))
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def embedded(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [n] of the embedding table; read one by one unless all are loaded."""
        name = "embed"
        if name in self._loaded:
            return self._loaded[name][ids]
        wanted: list[int] = ids.tolist()
        last = self._source.spec.vocab - 1
        if unknown := [index for index in wanted if not 0 <= index <= last]:
            raise IndexError(f"row {unknown[0]} of {name}, expected 0 to {last}")
        found = {i: torch.from_numpy(self._source.rows(name, i, i + 1)) for i in set(wanted)}
        return torch.cat([found[index] for index in wanted])

    def forget(self, prefix: str) -> None:
        """Let go of every tensor whose name begins with ``prefix``."""
        for name in [name for name in self._loaded if name.startswith(prefix)]:
            del self._loaded[name]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` [.., d] over its root mean square, times ``weight`` [d]; in float32."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotary_tables(positions: Tensor, frequencies: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Cosine and sine [w, head_dim / 2] of the angles at ``positions`` [w].

    Angles are taken in float64, so that a late position loses nothing.
    """
    per_position = torch.tensor(frequencies, dtype=torch.float64)
    angles = positions.to(torch.float64)[:, None] * per_position
    return angles.cos().to(torch.float32), angles.sin().to(torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates ``x`` [w, heads, head_dim]: element i pairs with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Grouped attention of ``query`` [w, heads, hd] over S slots [S, kv_heads, hd]: [w, heads*hd].

    ``visible`` [w, S] bool. Slots that no row sees may hold anything, even NaN; a row that sees
    nothing gets zero.
    """
    width, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.view(width, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.permute(1, 2, 0)[:, None] * head_dim**-0.5
    scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    seen = values.masked_fill(~visible.any(0)[:, None, None], 0.0)
    mixed = weights @ seen.permute(1, 0, 2)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(width, heads * head_dim)


def active_flags(active: Active, sub_layers: int) -> tuple[bool, ...]:
    """One flag for each sub-layer; ValueError for another count, IndexError for an unknown id."""
    if isinstance(active, AbstractSet):
        unknown = [item for item in active if not 0 <= item < sub_layers]
        if unknown:
            raise IndexError(f"sub-layer {min(unknown)} of {sub_layers}")
        return tuple(SubLayerId(index) in active for index in range(sub_layers))
    if len(active) != sub_layers:
        raise ValueError(f"{len(active)} sub-layer flags for {sub_layers} sub-layers")
    return tuple(bool(flag) for flag in active)


def causal(width: int, past: int = 0) -> Tensor:
    """Mask [w, past + w] of a chain: each row sees the whole past, the rows before it, itself."""
    return torch.ones(width, past + width, dtype=torch.bool).tril(past)


class Decoder:
    """Runs passes of one model. Holds the weights, and no state between passes.

    ``linear`` computes every matrix product with a weight, the head (``head``) included; the
    default multiplies in float32. Weights that ``linear`` does not ask for are never loaded.
    """

    def __init__(self, source: ModelSource, linear: Linear | None = None) -> None:
        self.spec = source.spec
        self.weights = Weights(source)
        self._linear: Linear = linear or self.plain_linear

    def plain_linear(self, name: str, x: Tensor) -> Tensor:
        """``x`` [w, in] times the transposed float32 weight ``name`` [out, in]."""
        return F.linear(x, self.weights[name])

    @torch.no_grad()
    def embed(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Hidden rows [n, d] of token ids [n]."""
        return self.weights.embedded(torch.as_tensor(ids, dtype=torch.int64))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] from hidden rows [n, d]: final norm, then head."""
        return self._linear("head", self._norm("final_norm", hidden))

    @torch.no_grad()
    def run(
        self, hidden: Tensor, positions: Tensor, past: KeyValues, visible: Tensor, active: Active
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over ``w`` rows; the past is only read.

        ``hidden`` [w, d]; ``positions`` [w] int64; ``visible`` [w, T + w] bool, where slots
        0..T-1 are the past and T..T+w-1 this pass's own rows. Returns the hidden rows [w, d]
        before the final norm, and the new keys and values [L, w, kv_heads, head_dim]. A skipped
        sub-layer passes hidden rows through, and a skipped attention leaves zero rows.
        """
        self._check_shapes(hidden, positions, past, visible)
        flags = active_flags(active, self.spec.sub_layers)
        rotation = rotary_tables(positions, self.spec.rope.frequencies(self.spec.head_dim))
        new = KeyValues.zeros(self.spec, hidden.shape[0])
        for index in range(self.spec.layers):
            layer = LayerId(index)
            if flags[sub_layer_id(layer, SubLayerKind.ATTENTION)]:
                hidden = self._attention(layer, hidden, rotation, past, new, visible)
            if flags[sub_layer_id(layer, SubLayerKind.MLP)]:
                hidden = self._mlp(layer, hidden)
        return hidden, new.keys, new.values

    @torch.no_grad()
    def forward(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Logits [n, vocab] of a whole causal sequence."""
        hidden, _, _ = self._chain(ids, KeyValues.empty(self.spec))
        return self.logits(hidden)

    @torch.no_grad()
    def greedy(
        self, ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int] = ()
    ) -> list[int]:
        """The most probable continuation of ``ids`` (not empty), without them.

        Ties go to the lowest id. Ends early only after a token of ``eos_ids``, which it includes.
        """
        slots = len(ids) + max_new_tokens
        cache = KeyValues.zeros(self.spec, slots)
        pending, used, tokens = list(ids), 0, list[int]()
        while len(tokens) < max_new_tokens:
            past = KeyValues(cache.keys[:, :used], cache.values[:, :used])
            hidden, keys, values = self._chain(pending, past)
            end = used + len(pending)
            cache.keys[:, used:end], cache.values[:, used:end] = keys, values
            used = end
            pending = [int(self.logits(hidden[-1:]).argmax())]
            tokens += pending
            if pending[0] in eos_ids:
                break
        return tokens

    @torch.no_grad()
    def hidden_of_each(
        self, sequences: Sequence[Sequence[int]], progress: Callable[[LayerId], None] | None = None
    ) -> list[Tensor]:
        """Hidden rows [n, d], before the final norm, of whole causal sequences.

        All sequences go through a layer before any goes through the next, so the weights of one
        layer are in memory at a time. ``progress`` is told each layer that is done.
        """
        empty, rows = KeyValues.empty(self.spec), [self.embed(ids) for ids in sequences]
        for layer in map(LayerId, range(self.spec.layers)):
            active = frozenset(sub_layer_id(layer, kind) for kind in SubLayerKind)
            for index, hidden in enumerate(rows):
                width = hidden.shape[0]
                one = self.run(hidden, torch.arange(width), empty, causal(width), active)
                rows[index] = one[0]
            self.weights.forget(f"layers.{layer}.")
            if progress is not None:
                progress(layer)
        return rows

    def _chain(self, ids: Sequence[int] | Tensor, past: KeyValues) -> tuple[Tensor, Tensor, Tensor]:
        """All sub-layers over tokens that follow the past, which holds no gaps."""
        hidden = self.embed(ids)
        width = hidden.shape[0]
        positions = torch.arange(past.slots, past.slots + width)
        everything = [True] * self.spec.sub_layers
        return self.run(hidden, positions, past, causal(width, past.slots), everything)

    def _attention(
        self,
        layer: LayerId,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        past: KeyValues,
        new: KeyValues,
        visible: Tensor,
    ) -> Tensor:
        """The attention sub-layer with its residual; writes its rows of ``new``."""
        prefix, spec = f"layers.{layer}", self.spec
        x = self._norm(f"{prefix}.attn_norm", hidden)
        query, key, value = (
            self._projected(f"{prefix}.{part}", x, heads)
            for part, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))
        )
        if spec.qk_norm:
            query = self._norm(f"{prefix}.q_norm", query)
            key = self._norm(f"{prefix}.k_norm", key)
        new.keys[layer], new.values[layer] = rotate(key, *rotation), value
        keys = torch.cat([past.keys[layer], new.keys[layer]])
        values = torch.cat([past.values[layer], new.values[layer]])
        mixed = attend(rotate(query, *rotation), keys, values, visible)
        return hidden + self._linear(f"{prefix}.o", mixed)

    def _projected(self, name: str, x: Tensor, heads: int) -> Tensor:
        """``x`` [w, d] by the weight ``name`` and its bias, if it has one: [w, heads, head_dim]."""
        y = self._linear(name, x)
        if self.spec.qkv_bias:
            y = y + self.weights[f"{name}_bias"]
        return y.view(-1, heads, self.spec.head_dim)

    def _mlp(self, layer: LayerId, hidden: Tensor) -> Tensor:
        """The MLP sub-layer with its residual."""
        prefix = f"layers.{layer}"
        x = self._norm(f"{prefix}.mlp_norm", hidden)
        gated = F.silu(self._linear(f"{prefix}.gate", x)) * self._linear(f"{prefix}.up", x)
        return hidden + self._linear(f"{prefix}.down", gated)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[name], self.spec.norm_eps)

    def _check_shapes(
        self, hidden: Tensor, positions: Tensor, past: KeyValues, visible: Tensor
    ) -> None:
        """ValueError unless the arguments of a pass fit each other."""
        width = hidden.shape[0]
        cache = (self.spec.layers, past.slots, self.spec.kv_heads, self.spec.head_dim)
        for what, found, expected in (
            ("hidden", hidden, (width, self.spec.hidden)),
            ("positions", positions, (width,)),
            ("past keys", past.keys, cache),
            ("past values", past.values, cache),
            ("visible", visible, (width, past.slots + width)),
        ):
            if tuple(found.shape) != expected:
                raise ValueError(f"{what} is {tuple(found.shape)}, expected {expected}")
        if visible.dtype != torch.bool:
            raise ValueError(f"visible is {visible.dtype}, expected torch.bool")
