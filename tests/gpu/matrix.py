"""Cases that cover the sizes of docs/semantics.md: each value of each letter, not all combinations.

Every case has its own kernels to compile, about twenty; lengths and offsets do not add to them. All
lengths of interest are in one packed batch, so that kernels meet them together.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa import NSAConfig
from tests.ops.public import Case

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# l, d, l', n, w
PATTERNS = {
    "default": (32, 16, 64, 16, 512),
    "small": (8, 4, 16, 4, 32),
    "l' = 32": (32, 16, 32, 8, 100),
    "l' = 128": (32, 32, 128, 5, 300),
    "odd": (48, 16, 64, 7, 77),
}


def edges(config: NSAConfig) -> tuple[int, ...]:
    """1, l - 1, l, l' - 1, l', l' + 1, 257, more than n * l', and an empty sequence among them."""
    size, block = config.compress_block_size, config.block_size
    longer = config.num_selected_blocks * block + block + 13
    return (1, size - 1, size, 0, block - 1, block, 257, block + 1, longer)


def case_of(
    dtype: torch.dtype,
    group: int,
    dim: int,
    value_dim: int | None = None,
    *,
    kv: int = 2,
    pattern: str = "default",
    phi: Any = "mean",
    dense: bool = False,
    fewer: bool = False,
) -> Case:
    size, stride, block, n, window = PATTERNS[pattern]
    config = NSAConfig(
        num_heads=group * kv,
        num_kv_heads=kv,
        head_dim=dim,
        value_dim=value_dim or dim,
        compress_block_size=size,
        compress_stride=stride,
        block_size=block,
        num_selected_blocks=n,
        window_size=window,
        phi=phi,
    )
    lengths = edges(config)
    if dense:
        return Case(config, (lengths[-1],) * 3, dtype=dtype, device=DEVICE, dense=True)
    some = (1, 1, 0, 0, 5, block, 200, 64, 300)
    queries = tuple(min(a, b) for a, b in zip(some, lengths, strict=True)) if fewer else None
    return Case(config, lengths, queries, dtype=dtype, device=DEVICE)


MATRIX: dict[str, Case] = {
    "bf16 G1 D64": case_of(BF16, 1, 64),
    "bf16 G2 D128 linear": case_of(BF16, 2, 128, phi="linear"),
    "bf16 G3 D32 small": case_of(BF16, 3, 32, pattern="small"),
    "bf16 G4 D64 l'=128": case_of(BF16, 4, 64, pattern="l' = 128"),
    "bf16 G5 D16 l'=32": case_of(BF16, 5, 16, pattern="l' = 32"),
    "bf16 G6 D64": case_of(BF16, 6, 64),
    "bf16 G6 D64 fewer queries": case_of(BF16, 6, 64, fewer=True),
    "bf16 G6 D64 dense": case_of(BF16, 6, 64, dense=True),
    "bf16 G6 D64 mlp": case_of(BF16, 6, 64, phi="mlp"),
    "bf16 G7 D128 odd": case_of(BF16, 7, 128, pattern="odd"),
    "bf16 G8 D64": case_of(BF16, 8, 64),
    "bf16 G12 D64": case_of(BF16, 12, 64),
    "bf16 G16 D128": case_of(BF16, 16, 128),
    "bf16 G16 D192/128": case_of(BF16, 16, 192, 128),
    "bf16 G4 D256": case_of(BF16, 4, 256),
    "bf16 G64 D64": case_of(BF16, 64, 64, kv=1),
    "fp16 G6 D64": case_of(FP16, 6, 64),
    "fp16 G2 D192/128 small": case_of(FP16, 2, 192, 128, pattern="small"),
    "fp16 G16 D32 linear": case_of(FP16, 16, 32, phi="linear"),
    "fp32 G6 D64": case_of(FP32, 6, 64, fewer=True),
    "fp32 G1 D128 small linear": case_of(FP32, 1, 128, pattern="small", phi="linear"),
    "fp32 G3 D16 l'=32": case_of(FP32, 3, 16, pattern="l' = 32"),
    "fp32 G12 D32 small dense": case_of(FP32, 12, 32, pattern="small", dense=True),
    "fp32 G4 D192/128": case_of(FP32, 4, 192, 128),
    "fp32 G2 D256 small": case_of(FP32, 2, 256, pattern="small"),
}

# The case whose kernels other tests use again.
SEED = MATRIX["bf16 G6 D64"].config


def seed_case(
    *lengths: int,
    dtype: torch.dtype = BF16,
    queries: tuple[int, ...] | None = None,
    dense: bool = False,
) -> Case:
    """Sequences of these lengths in the seed shape: 12 heads, 2 KV heads, head size 64."""
    return Case(SEED, lengths, queries, dtype=dtype, device=DEVICE, dense=dense)
