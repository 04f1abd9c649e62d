"""``config.json`` of a Hugging Face folder: which family, which dimensions, and what is refused."""

from pathlib import Path
from typing import Any

import msgspec

from lowering.rope_scaling import Llama3Scaling, linear_factors, llama3_factors
from lowering.source import FAMILIES, Count, Family, LayerCount, Scale
from lowering.tokenizer import read_json
from profiles.errors import InputError, UnsupportedError
from runtime.model_spec import RopeSpec


class _Named(msgspec.Struct, frozen=True):
    """Read before the rest, so that another family is named and not called malformed."""

    architectures: list[str] | None = None
    model_type: str | None = None


class _Rope(msgspec.Struct, frozen=True):
    """``rope_parameters`` or the older ``rope_scaling``."""

    rope_theta: Scale | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: Scale | None = None
    low_freq_factor: Scale | None = None
    high_freq_factor: Scale | None = None
    original_max_position_embeddings: Count | None = None
    partial_rotary_factor: float | None = None
    full_attention: Any = None
    """Present where kinds of layers have rotations of their own."""

    @property
    def kind(self) -> str:
        """``default``, or how the rotation is stretched."""
        return self.rope_type or self.type or "default"


class Config(msgspec.Struct, frozen=True):
    """What matters of ``config.json``; an absent key means what it means in transformers."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: LayerCount
    num_attention_heads: Count
    vocab_size: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: Scale = 1e-6
    rope_theta: Scale | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool | None = None
    layer_types: list[str] | None = None
    num_local_experts: int | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    partial_rotary_factor: float | None = None
    quantization_config: dict[str, Any] | None = None


def read_config(path: Path) -> tuple[str, Config]:
    """The name of the family, of ``FAMILIES``, and its configuration.

    UnsupportedError for another family and for variants that no decoder here computes;
    InputError for a file that is missing or malformed.
    """
    named = read_json(path, _Named)
    if named is None:
        raise InputError(
            "file is missing", where=path, hint="a Hugging Face folder or a .gguf file is needed"
        )
    first = (named.architectures or [None])[0]
    name = next((name for name, it in FAMILIES.items() if first == it.hf_class), None)
    if first is None and named.model_type in FAMILIES:
        name = named.model_type
    if name is None:
        raise UnsupportedError(
            "unsupported architecture",
            where=path,
            found=first or named.model_type,
            expected=f"one of {', '.join(family.hf_class for family in FAMILIES.values())}",
        )
    config = read_json(path, Config)
    if config is None:
        raise InputError("file is missing", where=path)
    _check_supported(config, FAMILIES[name], path)
    return name, config


def _check_supported(config: Config, family: Family, path: Path) -> None:
    """UnsupportedError for variants of the architecture that the decoder does not compute."""
    ropes = [rope for rope in (config.rope_scaling, config.rope_parameters) if rope is not None]
    partial = [rope.partial_rotary_factor for rope in ropes] + [config.partial_rotary_factor]
    kinds = [rope.kind for rope in ropes]
    storage = config.quantization_config
    layer_types = set(config.layer_types or ())
    unusual: dict[str, tuple[object, tuple[object, ...]]] = {
        "rope scaling": (
            next((kind for kind in kinds if kind not in _ROPE_KINDS), None),
            (None, *_ROPE_KINDS),
        ),
        "a rotation for each kind of layer": (
            next((r.full_attention for r in ropes if r.full_attention is not None), None),
            (None,),
        ),
        "attention bias": (config.attention_bias, (False,)),
        "MLP bias": (config.mlp_bias, (False,)),
        "sliding window": (_sliding_window(config, family), (None,)),
        "layer type": (next(iter(sorted(layer_types - {"full_attention"})), None), (None,)),
        "mixture of experts": (config.num_local_experts, (None, 0, 1)),
        "soft capping of attention": (config.attn_logit_softcapping, (None,)),
        "soft capping of logits": (config.final_logit_softcapping, (None,)),
        "activation": (config.hidden_act, ("silu",)),
        "partial rotation": (next((p for p in partial if p not in (None, 1.0)), None), (None,)),
        "quantised storage": (storage and storage.get("quant_method", "unnamed"), (None,)),
    }
    for what, (found, supported) in unusual.items():
        if found not in supported:
            wanted = [str(value) for value in supported if value not in (None, False)]
            raise UnsupportedError(
                f"{what} is not supported",
                where=path,
                found=found,
                expected=f"one of {', '.join(wanted)}" if len(wanted) > 1 else (*wanted, "none")[0],
            )


_ROPE_KINDS = ("default", "linear", "llama3")


def _sliding_window(config: Config, family: Family) -> int | None:
    """The window that attention is limited to; some families carry one that is switched off."""
    window = config.sliding_window
    if window is msgspec.UNSET:
        window = family.sliding_window
    return None if config.use_sliding_window is False or window is msgspec.UNSET else window


def rope_spec(config: Config, head_dim: int, path: Path) -> RopeSpec:
    """The rotation; newer files keep its base in ``rope_parameters``, older ones at the top."""
    nested = config.rope_parameters.rope_theta if config.rope_parameters else None
    theta = nested or config.rope_theta or 10_000.0
    ropes = (config.rope_parameters, config.rope_scaling)
    rope = next((r for r in ropes if r is not None and r.kind != "default"), None)
    if rope is None:
        return RopeSpec(theta)
    if rope.factor is None:
        raise InputError("rope scaling lacks a number", where=path, expected="factor")
    if rope.kind == "linear":
        return RopeSpec(theta, linear_factors(head_dim, rope.factor))
    low, high, context = (
        rope.low_freq_factor,
        rope.high_freq_factor,
        rope.original_max_position_embeddings,
    )
    if low is None or high is None or context is None or low >= high:
        raise InputError(
            "rope scaling lacks a number, or has them in the wrong order",
            where=path,
            expected="low_freq_factor < high_freq_factor, original_max_position_embeddings",
        )
    scaling = Llama3Scaling(rope.factor, low, high, context)
    return RopeSpec(theta, llama3_factors(theta, head_dim, scaling))
