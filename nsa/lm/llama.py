"""Dense models in Llama's layout: names of weights and settings in transformers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from nsa.errors import check
from nsa.lm.config import LMConfig

LLAMA_EMBEDDING = "model.embed_tokens.weight"
_OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}


def llama_name(name: str) -> str:
    """Convert the name of a weight, such as ``layers.0.attention.q_proj.weight``, to Llama's."""
    first, _, rest = name.partition(".")
    if first != "layers":
        return f"{_OUTER[first]}.{rest}"
    number, part, rest = rest.split(".", 2)
    return f"model.layers.{number}.{LAYER_NAMES[part]}.{rest}"


def llama_settings(config: LMConfig) -> dict[str, Any]:
    """Return the settings of transformers' ``LlamaConfig`` for a dense model.

    Args:
        config: the model.

    Raises:
        ValueError: Llama does not support the model; the message names the setting.
    """
    nsa, scaling, bias = config.nsa, config.nsa.rope_scaling, config.nsa.projection_bias
    heads, size, kind = nsa.num_heads, nsa.head_dim, None if scaling is None else scaling.kind
    needed = (
        ("layers", config.layers, "be left out", config.layers is None),
        ("attention", config.attention, "be dense", config.attention == "dense"),
        ("mlp", config.mlp, "be swiglu", config.mlp == "swiglu"),
        ("nsa.value_dim", nsa.value_dim, f"equal head_dim ({size})", nsa.value_dim == size),
        ("nsa.rotary_dim", nsa.rotary_dim, f"be {size}", nsa.rotary_dim in (None, size)),
        ("nsa.rope_scaling", kind, "be linear, llama3 or left out", kind != "yarn"),
        ("nsa.qk_norm", nsa.qk_norm, "be false", not nsa.qk_norm),
        ("nsa.projection_bias", bias, "be none or all", bias != "qkv"),
        ("width", config.width, f"be a multiple of num_heads ({heads})", config.width % heads == 0),
    )
    for name, value, rule, holds in needed:
        check(holds, f"model.{name}", f"{rule} for Llama's layout", value)
    rope = {"rope_type": kind or "default", "rope_theta": nsa.rope_theta}
    if scaling is not None:
        rope["factor"] = scaling.factor
    if scaling is not None and kind == "llama3":
        rope["low_freq_factor"] = scaling.beta_slow
        rope["high_freq_factor"] = scaling.beta_fast
        rope["original_max_position_embeddings"] = scaling.original_max_position
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": nsa.num_kv_heads,
        "head_dim": size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_head,
        "attention_bias": bias == "all",
        "mlp_bias": False,
    }


def check_llama(argument: str, found: Mapping[str, Any], config: LMConfig) -> None:
    """Raise an error if the settings of a Llama differ from a dense model.

    Args:
        argument: argument that named the Llama.
        found: ``config.json`` of the Llama.
        config: the model.
    """
    heads, width = found.get("num_attention_heads", 32), found.get("hidden_size", 4096)
    for name, size in (("num_attention_heads", heads), ("hidden_size", width)):
        is_size = isinstance(size, int) and size > 0
        check(is_size, argument, f"have a positive integer as {name}", repr(size))
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    check(isinstance(rope, dict), argument, "have rope_parameters as an object", rope)
    rope = {**rope}
    rope = {"rope_type": rope.pop("type", "default"), **rope}
    rope.setdefault("rope_theta", found.get("rope_theta", 10_000.0))
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    values = {**defaults, **{key: x for key, x in found.items() if x is not None}}
    values["rope_parameters"] = rope
    for name, wanted in llama_settings(config).items():
        value = values.get(name)
        check(
            as_fp32(value) == as_fp32(wanted),
            argument,
            f"have {name} {wanted}, as the run",
            value,
        )


def as_fp32(value: Any) -> Any:
    """Round floats as files of other programs store them; other values stay."""
    if isinstance(value, dict):
        return {key: as_fp32(x) for key, x in value.items()}
    return ctypes.c_float(value).value if isinstance(value, float) else value
