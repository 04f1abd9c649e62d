"""What a model is: dimensions, rotary embedding, tokens. Read from a source, kept in the plan."""

import msgspec

MAX_HEAD_DIM = 128
"""Widest head whose scores are summed in one order in every pass (``docs/numerics.md``)."""
MIN_ROPE_FACTOR = 1e-6
MAX_ROPE_FACTOR = 1e6


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding in the half-rotation layout (first half pairs with second)."""

    theta: float
    """Base of the geometric sequence of wavelengths."""
    factors: tuple[float, ...] = ()
    """What the frequency of each pair is divided by, [head_dim / 2]; empty: by nothing."""

    def frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Radians per position of each pair, [head_dim / 2]."""
        plain = [self.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
        factors = self.factors or (1.0,) * len(plain)
        return tuple(one / factor for one, factor in zip(plain, factors, strict=True))


class TokenizerSpec(msgspec.Struct, frozen=True):
    """What the runtime needs beside ``tokenizer.json``."""

    bos_id: int | None
    """Token put before a raw prompt when ``add_bos`` is set."""
    add_bos: bool
    eos_ids: tuple[int, ...]
    """Tokens that end a generation, the one that templates call ``eos_token`` first; or none."""
    chat_template: str | None
    """Jinja source; rendered in a sandbox."""
    digest: str
    """SHA-256 of ``tokenizer.json``, hex."""


class ModelSpec(msgspec.Struct, frozen=True):
    """A decoder-only transformer: RMS norms, rotary GQA attention, gated SiLU MLP.

    What families add to that are facts here; nothing else asks for the architecture's name.
    """

    name: str
    architecture: str
    """Name of the family, such as ``llama``; for people."""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_context: int
    """Positions that the model was trained for."""
    norm_eps: float
    rope: RopeSpec
    tied_head: bool
    """The LM head is the embedding table."""
    tokenizer: TokenizerSpec
    weights_digest: str
    """SHA-256 of the weight files, hex."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias, added before anything else is done with them."""
    qk_norm: bool = False
    """Each head of queries and keys has an RMS norm, before the rotation."""

    @property
    def sub_layers(self) -> int:
        """Number of residual blocks, 2L."""
        return 2 * self.layers

    @property
    def kv_dim(self) -> int:
        """Elements of one key (or value) row."""
        return self.kv_heads * self.head_dim
