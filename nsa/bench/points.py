"""What is measured: shapes, lengths, and the inputs made for them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops.selection.reference import choose_blocks
from nsa.testing import make_inputs

# Values of the field `choice`: neighbouring queries that share their selection of blocks. What
# models have selected is the other one.
CHOICES = {"random": 1, "shared4": 4, "shared16": 16}
RECORDED = "recorded"

# Noise of a query relative to its group's direction, where a selection is shared: two queries of a
# group are never equal, and still select (nearly) the same blocks.
OWN_NOISE = 0.03
_CHUNK_ELEMENTS = 2**27
WHOLE_INPUTS = ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win", "gates")


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
        """The default pattern (l, d, l', n, w = 32, 16, 64, 16, 512, phi mean) with these heads."""
        heads = asdict(self)
        del heads["name"], heads["tokens"]
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
        rule, hint = f"be one of {', '.join(SHAPES)}, or HqxHkvxDxDv", "For example: 12x2x64x64"
        fail("nsa bench", "--shape", rule, repr(text), hint)
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
        choice: how far neighbouring queries agree, a key of ``CHOICES``, or ``RECORDED``.
        dtype: of all float tensors.
        device: where it is measured.
        recorded: file of recorded selections.
    """

    shape: Shape
    seq_len: int
    batch: int
    choice: str
    dtype: torch.dtype
    device: torch.device
    recorded: Path | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch * self.seq_len


def batch_of(shape: Shape, seq_len: int, tokens: int | None) -> int:
    """Sequences that make up ``tokens`` (None: those of the shape, or one sequence)."""
    total = shape.tokens if tokens is None else tokens
    return 1 if total is None else max(1, total // seq_len)


def make_tensors(point: Point, config: NSAConfig) -> dict[str, Tensor]:
    """Inputs of whole attention, dense ``[B, S, H, D]``, and the gradient ``dout`` of its output.

    All are independent Gaussians, gates uniform. With a shared selection the queries of an aligned
    group of neighbours point in one direction, each with noise of 3% of its length (``OWN_NOISE``):
    so they rank the blocks alike.
    """
    lengths, device = [point.seq_len] * point.batch, point.device
    packed = make_inputs(config, lengths, dtype=point.dtype, device=device)
    batch = point.batch, point.seq_len
    tensors = {name: getattr(packed, name).unflatten(0, batch) for name in WHOLE_INPUTS}
    group = CHOICES.get(point.choice, 1)
    if group > 1:
        tensors["q"] = share_directions(tensors["q"], group)
    tensors["dout"] = normal((*batch, config.num_heads, config.value_dim), point, seed=1)
    return tensors


def normal(shape: tuple[int, ...], point: Point, seed: int) -> Tensor:
    """Gaussian numbers, drawn in fp32."""
    generator = torch.Generator(device=point.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=point.device).to(point.dtype)


def share_directions(q: Tensor, group: int) -> Tensor:
    """Each query of ``[B, S, Hq, D]`` becomes the first of its group, plus a little of itself."""
    first = torch.arange(q.shape[1], device=q.device) // group * group
    return (q[:, first].float() + OWN_NOISE * q.float()).to(q.dtype)


def given_selection(point: Point, config: NSAConfig) -> Tensor:
    """Indices for the selected branch alone: recorded, or made by :func:`hand_made_selection`."""
    if point.recorded is None or point.choice != RECORDED:
        return hand_made_selection(point, config)
    from nsa.lm.recorded import load_selections  # needs NumPy, which `nsa doctor` does without

    layers, block_size = load_selections(point.recorded)
    _, heads, num_blocks = layers[0].shape
    found, wanted = (
        (heads, num_blocks, block_size),
        (config.num_kv_heads, config.num_selected_blocks, config.block_size),
    )
    rule = f"hold {wanted} KV heads, blocks a query and tokens a block"
    check(found == wanted, "nsa bench", "--recorded", rule, found)
    longest, rule = layers[0].shape[0], "be at most the recorded tokens"
    check(point.seq_len <= longest, "nsa bench", "--seqs", rule, f"{point.seq_len} of {longest}")
    # Each sequence is as in the next layer. Queries do not depend on what is behind them.
    parts = [layers[b % len(layers)][: point.seq_len] for b in range(point.batch)]
    return torch.stack(parts).to(point.device)


def hand_made_selection(point: Point, config: NSAConfig) -> Tensor:
    """Indices for the selected branch alone, int32 ``[B, S, Hkv, n]``, ascending, -1 at the end.

    The forced blocks and others at random, drawn anew for each aligned group of queries that share
    their selection. A group lies within a block, so that its forced blocks agree too.
    """
    blocks, group = -(-point.seq_len // config.block_size), CHOICES[point.choice]
    generator = torch.Generator(device=point.device).manual_seed(2)
    positions = torch.arange(0, point.seq_len, group, device=point.device).repeat(point.batch)
    parts = []
    for some in positions.split(max(1, _CHUNK_ELEMENTS // (blocks * config.num_kv_heads))):
        shape = (len(some), config.num_kv_heads, blocks)
        scores = torch.rand(shape, generator=generator, device=point.device)
        parts.append(choose_blocks(scores, some, config))
    chosen = torch.cat(parts).unflatten(0, (point.batch, -1))
    return chosen.repeat_interleave(group, dim=1)[:, : point.seq_len].contiguous()
