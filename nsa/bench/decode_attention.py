"""Attention of one decode step: by this library, and dense by several others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nsa.attention import AttentionInputs
from nsa.bench.clock import time_call
from nsa.bench.implementations import UnsupportedError
from nsa.bench.points import Point, normal
from nsa.cache import NSACache
from nsa.cache.chunk import new_tokens
from nsa.config import NSAConfig
from nsa.lm.dense_attention import dense_pattern
from nsa.ops._backend import kernels_run_on_cpu
from nsa.ops._sequences import Sequences
from nsa.rope import Rope
from nsa.testing import assert_within_budget, make_inputs
from nsa.testing.decode import fill_cache, reference_step

# Backends of SDPA, and part of the name of their kernel.
_SDPA = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    "fa2": (SDPBackend.FLASH_ATTENTION, "flash_fwd"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "fmha"),
}
# Kernels of a step of this library.
DENSE_KERNELS = ("decode_append", "decode_scan", "decode_merge")
KERNELS = (*DENSE_KERNELS, "decode_select")


@dataclass(frozen=True)
class Attention:
    """Attention of a new token of each sequence, ready to be called again and again.

    Attributes:
        call: gives ``[B, Hq, Dv]``.
        exact: the same of one sequence ``[1, Hq, Dv]`` in a dtype, by the reference.
        kernels: parts of the names of kernels that have to run.
        bytes_read: keys and values that a call loads, bytes; None where they are not counted.
    """

    call: Callable[[], Tensor]
    exact: Callable[[int, torch.dtype], Tensor]
    kernels: tuple[str, ...]
    bytes_read: int | None

    def compare(self, errors: dict[str, float]) -> None:
        """Fail unless the first and the last sequence are as near to fp64 as rounding allows."""
        out = self.call()
        sequences = sorted({0, out.shape[0] - 1})
        exact, plain = (
            torch.cat([self.exact(b, dtype) for b in sequences])
            for dtype in (torch.float64, torch.float32)
        )
        found = assert_within_budget(out[sequences], plain.to(out.dtype), exact, "out")
        errors["out"] = found.total


def prepare_attention(provider: str, point: Point) -> Attention:
    """The step of a provider, with a context of random keys and values.

    Raises:
        UnsupportedError: it needs a GPU.
    """
    config = point.shape.config()
    if provider == "reference":
        return _cached(point, config, ())
    if point.device.type != "cuda" and not kernels_run_on_cpu():
        raise UnsupportedError("it needs a CUDA GPU")
    if provider == "nsa":
        return _cached(point, config, KERNELS)
    if provider == "dense-scan":
        return _cached(point, dense_pattern(config, point.seq_len), DENSE_KERNELS)
    return _static(point, config, provider)


def _cached(point: Point, config: NSAConfig, kernels: tuple[str, ...]) -> Attention:
    """A step over a decode cache by these kernels; without any, by the reference."""
    batch, length = point.batch, point.seq_len - 1
    x = make_inputs(config, [1] * batch, seed=1, dtype=point.dtype, device=point.device)
    sparse = (x.k_cmp_raw, x.v_cmp_raw, x.k_slc, x.v_slc) if config.scores_blocks else [None] * 4
    gates = x.gates if config.scores_blocks else torch.ones_like(x.gates)
    inputs = AttentionInputs._make((x.q, *sparse, x.k_win, x.v_win, gates, None, None))
    rope, whole = Rope.from_config(config), NSACache(config, 1, batch, max_tokens=point.seq_len)
    (layer,) = whole.layers
    layer.attend(inputs, rope=rope, sequences=Sequences(None, batch, 1, 1, point.device))
    fill_cache(whole, length - 1)
    tensors = layer.tensors
    assert tensors is not None

    def exact(sequence: int, dtype: torch.dtype) -> Tensor:
        return reference_step(config, tensors, length, inputs, rope, sequence, dtype)

    if not kernels:
        all_of_them = [partial(exact, sequence, point.dtype) for sequence in range(batch)]
        return Attention(lambda: torch.cat([one() for one in all_of_them]), exact, (), None)
    from nsa.ops.decode.launch import append, attend

    def step(reads: Tensor | None = None) -> Tensor:
        append(new_tokens(inputs, tensors), tensors, None, rope, config, 1)
        return attend(inputs.q, None, inputs.gates, tensors, config, 1, reads)[0]

    reads = torch.zeros(batch * config.num_kv_heads, 3, dtype=torch.int64, device=point.device)
    step(reads)
    return Attention(step, exact, kernels, bytes_of_keys(int(reads.sum()), config, point.dtype))


def bytes_of_keys(keys: int, config: NSAConfig, dtype: torch.dtype) -> int:
    """Of so many keys of one head and their values."""
    return keys * (config.head_dim + config.value_dim) * dtype.itemsize


def _static(point: Point, config: NSAConfig, provider: str) -> Attention:
    """Dense attention by PyTorch over static keys and values.

    Of a ``-folded`` provider the query heads that share keys are the rows of one query tile.
    """
    heads, batch, seq_len = config.num_kv_heads, point.batch, point.seq_len
    q = normal((batch, config.num_heads, 1, config.head_dim), point, seed=1)
    k, v = (
        normal((batch, heads, seq_len, size), point, seed)
        for seed, size in ((2, config.head_dim), (3, config.value_dim))
    )

    def exact(sequence: int, dtype: torch.dtype) -> Tensor:
        queries = q[sequence].to(dtype).view(heads, -1, config.head_dim)
        scores = queries @ k[sequence].to(dtype).mT * config.head_dim**-0.5
        return (scores.softmax(-1) @ v[sequence].to(dtype)).flatten(0, 1)[None]

    kind = provider.removeprefix("dense-").removesuffix("-folded")
    attend, kernel = (_flex(), "triton_") if kind == "flex" else (_sdpa(kind), _SDPA[kind][1])
    queries = q.view(batch, heads, -1, config.head_dim) if provider.endswith("folded") else q
    shape = batch, config.num_heads, config.value_dim
    call = partial(attend, queries, k, v, enable_gqa=queries is q)
    read = bytes_of_keys(batch * heads * seq_len, config, point.dtype)
    return Attention(lambda: call().reshape(shape), exact, (kernel,), read)


def _sdpa(kind: str) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool) -> Tensor:
        with sdpa_kernel(_SDPA[kind][0]):
            return scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

    return attend


def _flex() -> Callable[..., Tensor]:
    """Compiled FlexAttention, which has kernels for few queries."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # each point is compiled for itself, as is best for it
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@cache
def copy_tbps(device: torch.device) -> float:
    """Bytes that a copy of a large tensor reads and writes in a second, TB/s."""
    size = 2**30 if device.type == "cuda" else 2**24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / time_call(lambda: target.copy_(source), device, 100.0).p50 / 1e9
