"""Native Sparse Attention in tests: random inputs, the library's call, the oracle's call."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from nsa import NSAConfig, PhiWeights, Rope, native_sparse_attention
from tests import oracle
from tests.ops.cases import Batch, array, stack

NAMES = ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win", "gates")
PHI_NAMES = {"mean": (), "linear": ("weight",), "mlp": ("position", "w1", "w2")}


@dataclasses.dataclass
class Inputs:
    """Tensors of one call by name, parameters of the compression of keys and values too."""

    tensors: dict[str, Tensor]
    phi_k: dict[str, Tensor]
    phi_v: dict[str, Tensor]
    q_cmp: Tensor | None


def phi_parameters(batch: Batch, size: int) -> dict[str, Tensor]:
    """Random parameters of phi, scaled so that compressed rows are about as large as raw ones.

    Larger keys would make softmax so peaked that in 16 bits the rounding of the scores alone
    changes the result by several per cent.
    """
    config = batch.config
    heads, length, hidden = (
        config.num_kv_heads,
        config.compress_block_size,
        config.compress_hidden_size or 2 * size,
    )
    shapes = {
        "weight": ((heads, length, size), length**-0.5),
        "position": ((heads, length, size), 0.5),
        "w1": ((heads, length * size, hidden), (length * size) ** -0.5),
        "w2": ((heads, hidden, size), hidden**-0.5),
    }
    return {
        name: batch.normal(*shapes[name][0], scale=shapes[name][1])
        for name in PHI_NAMES[config.phi]
    }


def make(batch: Batch) -> Inputs:
    """Random inputs for everything that the config may ask for."""
    tensors = (
        batch.q(),
        batch.k(),
        batch.v(),
        batch.k(),
        batch.v(),
        batch.k(),
        batch.v(),
        batch.gates(),
    )
    named = dict(zip(NAMES, tensors, strict=True))
    if batch.config.has_index:
        named["q_idx"], named["k_idx"] = batch.index()
    return Inputs(
        named,
        phi_parameters(batch, batch.config.head_dim),
        phi_parameters(batch, batch.config.value_dim),
        batch.q() if batch.config.compress_rope == "none" else None,
    )


def run(config: NSAConfig, inputs: Inputs, rope: Rope | None = None, **kwargs: Any) -> Tensor:
    phi = (PhiWeights(**inputs.phi_k), PhiWeights(**inputs.phi_v)) if inputs.phi_k else None
    given: dict[str, Any] = {**inputs.tensors, **kwargs}
    return native_sparse_attention(**given, phi=phi, config=config, q_cmp=inputs.q_cmp, rope=rope)


def run_oracle(
    batch: Batch, inputs: Inputs, rope: bool = True, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and block indices by the oracle; ``rope`` rotates compressed keys."""
    config = batch.config

    def rotated(keys: np.ndarray, positions: list[int]) -> np.ndarray:
        return oracle.rotate(
            keys, positions, config.rotary_dim, config.rope_theta, config.rope_scaling
        )

    def one(rows: slice, tokens: slice, _: slice) -> tuple[np.ndarray, np.ndarray]:
        arrays = {name: array(x) for name, x in inputs.tensors.items()}
        given: dict[str, Any] = {
            name: x[rows if name in ("q", "gates", "q_idx") else tokens]
            for name, x in arrays.items()
        }
        return oracle.native_sparse_attention(
            **given,
            config=config,
            phi_k={name: array(x) for name, x in inputs.phi_k.items()},
            phi_v={name: array(x) for name, x in inputs.phi_v.items()},
            q_cmp=None if inputs.q_cmp is None else array(inputs.q_cmp)[rows],
            rotate_keys=rotated if rope else None,
            scale=scale,
        )

    out, indices = stack(batch, one)
    return out, indices
