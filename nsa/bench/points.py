"""What is measured: shapes, lengths, choices, and the inputs made for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import fail
from nsa.testing import make_inputs

# Neighbouring queries that share their choice of blocks.
CHOICES = {"random": 1, "shared4": 4, "shared16": 16}

# Own noise of a query beside its group's direction, where a choice is shared: two queries of a group are never equal, and
# still choose (nearly) the same blocks.
OWN_NOISE = 0.03
_CHUNK_ELEMENTS = 2**27


@dataclass(frozen=True)
class Shape:
    """Heads and their sizes.

    Attributes:
        name: as it was asked for.
        num_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D.
        value_dim: Dv.
        tokens: tokens of all sequences together; None means one sequence.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    tokens: int | None = None

    def config(self, overrides: dict[str, Any] | None = None) -> NSAConfig:
        """The default sparse pattern (l, d, l', n, w = 32, 16, 64, 16, 512, phi mean) with these heads."""
        heads = {name: getattr(self, name) for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim")}
        return NSAConfig(**{**heads, **(overrides or {})})


SHAPES = {
    "seed": Shape("seed", 12, 2, 64, 64, tokens=65_536),
    "wide": Shape("wide", 64, 4, 128, 128),
    "paper": Shape("paper", 64, 4, 192, 128),
}


def parse_shape(text: str) -> Shape:
    """``seed``, ``wide``, ``paper`` or ``HqxHkvxDxDv``."""
    if text in SHAPES:
        return SHAPES[text]
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text)
    if found is None:
        fail("nsa bench", "--shape", f"be one of {', '.join(SHAPES)}, or HqxHkvxDxDv", repr(text), "For example: 12x2x64x64")
    shape = Shape(text, *(int(size) for size in found.groups()))
    shape.config()
    return shape


@dataclass(frozen=True)
class Point:
    """One place of measurement.

    Attributes:
        shape: heads.
        seq_len: S, query and key tokens of a sequence.
        batch: B, sequences.
        choice: how far neighbouring queries agree, a key of ``CHOICES``.
        dtype: of all float tensors.
        device: where it is measured.
        seed: of the inputs.
    """

    shape: Shape
    seq_len: int
    batch: int
    choice: str
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq_len


def batch_of(shape: Shape, seq_len: int, tokens: int | None) -> int:
    """Sequences of ``seq_len`` that make up ``tokens`` (None: those of the shape, or one sequence); at least one."""
    total = shape.tokens if tokens is None else tokens
    return 1 if total is None else max(1, total // seq_len)


def make_tensors(point: Point, config: NSAConfig) -> dict[str, Tensor]:
    """Inputs of whole attention, dense ``[B, S, H, D]``, and the gradient ``dout`` of its output.

    All are independent Gaussians, gates uniform. With a shared choice the queries of an aligned group of neighbours point in
    one direction, each with noise of its own of 3% of its length (``OWN_NOISE``): so they rank the blocks alike.
    """
    packed = make_inputs(config, [point.seq_len] * point.batch, seed=point.seed, dtype=point.dtype, device=point.device)
    names = ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win", "gates")
    tensors = {name: getattr(packed, name).unflatten(0, (point.batch, point.seq_len)) for name in names}
    group = CHOICES[point.choice]
    if group > 1:
        tensors["q"] = share_directions(tensors["q"], group)
    shape = (point.batch, point.seq_len, config.num_heads, config.value_dim)
    tensors["dout"] = normal(shape, point, seed=1)
    return tensors


def normal(shape: tuple[int, ...], point: Point, seed: int) -> Tensor:
    """Gaussian numbers, drawn in fp32."""
    generator = torch.Generator(device=point.device).manual_seed(point.seed + seed)
    return torch.randn(shape, generator=generator, device=point.device).to(point.dtype)


def share_directions(q: Tensor, group: int) -> Tensor:
    """Each query becomes the first one of its aligned group of neighbours, plus a little of itself: ``[B, S, Hq, D]``."""
    first = torch.arange(q.shape[1], device=q.device) // group * group
    return (q[:, first].float() + OWN_NOISE * q.float()).to(q.dtype)


def hand_made_choice(point: Point, config: NSAConfig) -> Tensor:
    """Indices for the selected branch alone, int32 ``[B, S, Hkv, n]``, ascending, -1 at the end.

    The forced blocks, the rest drawn at random, anew for each aligned group of queries that share their choice. A group lies
    within a block, so that its forced blocks agree too.
    """
    blocks = -(-point.seq_len // config.block_size)
    rows = torch.arange(0, point.seq_len, CHOICES[point.choice], device=point.device)
    current = (rows // config.block_size)[:, None, None]
    block = torch.arange(blocks, device=point.device)
    forced = (block < config.num_init_blocks) | (block > current - config.num_local_blocks)
    generator = torch.Generator(device=point.device).manual_seed(point.seed + 2)
    n = min(config.num_selected_blocks, blocks)
    step = max(1, _CHUNK_ELEMENTS // (blocks * config.num_kv_heads))
    parts = []
    for _ in range(point.batch):
        for at in range(0, len(rows), step):
            now = slice(at, at + step)
            shape = (len(rows[now]), config.num_kv_heads, blocks)
            rank = torch.rand(shape, generator=generator, device=point.device)
            rank = torch.where(forced[now], 2.0, rank).masked_fill(block > current[now], -1.0)
            best = rank.topk(n, dim=-1)
            ids = torch.where(best.values >= 0, best.indices, blocks).sort(-1).values
            parts.append(torch.where(ids < blocks, ids, -1).int())
    chosen = torch.cat(parts).unflatten(0, (point.batch, len(rows)))
    chosen = chosen.repeat_interleave(CHOICES[point.choice], dim=1)[:, : point.seq_len]
    return torch.nn.functional.pad(chosen, (0, config.num_selected_blocks - n), value=-1).contiguous()


def overlap(block_indices: Tensor, group: int) -> float:
    """Share of a query's chosen blocks that the first query of its aligned group chose too.

    Args:
        block_indices: ``[B, S, Hkv, n]``.
        group: queries of a group; the first ones, which agree with themselves, do not count.
    """
    whole = block_indices.shape[1] // group * group
    ids = block_indices[:, :whole].unflatten(1, (-1, group)).flatten(0, 1)  # [groups, group, Hkv, n]
    if group == 1 or ids.shape[0] == 0:
        return 1.0
    if ids.shape[0] > 4096:
        ids = ids[:: ids.shape[0] // 4096]
    others, first = ids[:, 1:], ids[:, :1]
    found = (others[..., None] == first[..., None, :]).any(-1) & (others >= 0)
    return float(found.sum() / (others >= 0).sum())
