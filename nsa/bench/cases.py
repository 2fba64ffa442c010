"""Benchmark cases: shapes, inputs, calls and useful work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.attention import native_sparse_attention
from nsa.config import BRANCHES, NSAConfig
from nsa.errors import check, fail
from nsa.ops._sequences import Sequences, pack
from nsa.ops.combination import combine
from nsa.ops.compression import Raw, run_compress
from nsa.ops.range import compressed_attention, window_attention
from nsa.ops.selected import selected_attention
from nsa.ops.selection import select_blocks
from nsa.ops.selection.reference import choose_blocks
from nsa.rope import Rope
from nsa.testing import make_inputs

Tensors = dict[str, Tensor]
Call = Callable[[Tensors, NSAConfig, str], tuple[Tensor, ...]]
MODES = ("fwd", "fwd_bwd")
# Number of neighbouring queries with the same selection, by value of the field `choice`.
CHOICES = {"random": 1, "shared4": 4, "shared16": 16}
RECORDED = "recorded"  # selections of a trained model
# Noise relative to the common direction of queries that share a selection, so that they differ but
# select (nearly) the same blocks.
OWN_NOISE = 0.03
_CHUNK_ELEMENTS = 2**27
WHOLE_INPUTS = ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win", "gates")


# --- Shapes and inputs
@dataclass(frozen=True)
class Shape:
    """Heads and their sizes.

    Attributes:
        name: name in rows.
        num_heads: Hq.
        num_kv_heads: Hkv.
        head_dim: D.
        value_dim: Dv.
        tokens: total tokens of all sequences; None means one sequence.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    tokens: int | None = None

    def config(self, overrides: dict[str, Any] | None = None) -> NSAConfig:
        """Default pattern (l, d, l', n, w = 32, 16, 64, 16, 512, phi mean) with these heads."""
        heads = asdict(self)
        del heads["name"], heads["tokens"]
        return NSAConfig(**{**heads, **(overrides or {})})


SHAPES = {
    "seed": Shape("seed", 12, 2, 64, 64, tokens=65_536),
    "wide": Shape("wide", 64, 4, 128, 128),
    "paper": Shape("paper", 64, 4, 192, 128),
}


def parse_shape(text: str) -> Shape:
    """Parse ``seed``, ``wide``, ``paper`` or ``HqxHkvxDxDv``."""
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
    """Heads, lengths, selection, dtype and device of a measurement.

    Attributes:
        shape: heads and their sizes.
        seq_len: S, query and key tokens of a sequence.
        batch: B, number of sequences.
        choice: a key of ``CHOICES``, or ``RECORDED``.
        dtype: dtype of all float tensors.
        device: the measured device.
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
        """Total tokens of all sequences."""
        return self.batch * self.seq_len

    def fields(self) -> dict[str, Any]:
        """Return the fields of a row."""
        names = {name: getattr(self, name) for name in ("choice", "seq_len", "batch")}
        return {**names, "shape": self.shape.name, "dtype": str(self.dtype).removeprefix("torch.")}


def batch_of(shape: Shape, seq_len: int, tokens: int | None) -> int:
    """Return the number of sequences in ``tokens`` (None: the shape's tokens, or one sequence)."""
    total = shape.tokens if tokens is None else tokens
    return 1 if total is None else max(1, total // seq_len)


def make_tensors(point: Point, config: NSAConfig) -> Tensors:
    """Make inputs of whole attention, dense ``[B, S, H, D]``, and the gradient ``dout``.

    Tensors are Gaussian, gates uniform. With a shared selection, the queries of each aligned group
    have a common direction and 3% noise.
    """
    batch = point.batch, point.seq_len
    packed = make_inputs(
        config, [point.seq_len] * point.batch, dtype=point.dtype, device=point.device
    )
    tensors = {name: getattr(packed, name).unflatten(0, batch) for name in WHOLE_INPUTS}
    group, q = CHOICES.get(point.choice, 1), tensors["q"]
    if group > 1:
        first = torch.arange(q.shape[1], device=q.device) // group * group
        tensors["q"] = (q[:, first].float() + OWN_NOISE * q.float()).to(q.dtype)
    tensors["dout"] = normal((*batch, config.num_heads, config.value_dim), point, seed=1)
    return tensors


def normal(shape: tuple[int, ...], point: Point, seed: int) -> Tensor:
    """Draw Gaussian numbers in fp32 and round them to the point's dtype."""
    generator = torch.Generator(device=point.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=point.device).to(point.dtype)


def given_selection(point: Point, config: NSAConfig) -> Tensor:
    """Block indices for the selected branch alone, int32 ``[B, S, Hkv, n]``: recorded or random.

    Random selections contain the forced blocks and random ones, ascending, with -1 at the end. Each
    aligned group of queries with a shared selection is drawn once and is within one block.
    """
    if point.choice == RECORDED:
        return _recorded_selection(point, config)
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


def _recorded_selection(point: Point, config: NSAConfig) -> Tensor:
    """Read recorded selections; each sequence uses those of the next layer."""
    from nsa.lm.recorded import load_selections

    assert point.recorded is not None
    layers, block_size = load_selections(point.recorded)
    longest, heads, num_blocks = layers[0].shape
    found = (heads, num_blocks, block_size)
    wanted = (config.num_kv_heads, config.num_selected_blocks, config.block_size)
    rule = f"contain {wanted} KV heads, blocks a query and tokens a block"
    check(found == wanted, "nsa bench", "--recorded", rule, found)
    rule = "be at most the recorded tokens"
    check(point.seq_len <= longest, "nsa bench", "--seqs", rule, f"{point.seq_len} of {longest}")
    # Queries do not depend on later tokens, so a prefix of the recording is valid.
    parts = [layers[b % len(layers)][: point.seq_len] for b in range(point.batch)]
    return torch.stack(parts).to(point.device)


# --- Operators
@dataclass(frozen=True)
class Case:
    """One operator, or whole attention.

    Attributes:
        name: name in rows.
        inputs: names of the inputs with gradients, in the order of the gradients.
        call: ``(tensors, config, backend) -> outputs``.
        kernels: name prefixes of its kernels, forward and backward.
        outputs: names of the outputs, which have gradients unless there is no backward pass.
    """

    name: str
    inputs: tuple[str, ...]
    call: Call
    kernels: tuple[tuple[str, ...], tuple[str, ...]]
    outputs: tuple[str, ...] = ("out",)

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of the case: ``fwd``, and ``fwd_bwd`` if it has a backward pass."""
        return MODES if self.inputs else MODES[:1]


def _attention(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    call: Callable[..., Tensor] = native_sparse_attention
    inputs = (x[name] for name in WHOLE_INPUTS)
    return (call(*inputs, None, config, rope=Rope.from_config(config), backend=backend),)


def compress_and_rotate(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    """Compute rotated k_cmp, and v_cmp, of a dense batch, as in whole attention."""
    k, v = x["k_cmp_raw"], x["v_cmp_raw"]
    batch, length = k.shape[:2]
    sequences = Sequences(None, batch, length, length, k.device, (batch, length))
    raw = [Raw(pack(k), None, Rope.from_config(config)), Raw(pack(v), None, None)]
    return tuple(run_compress(raw, config, sequences, backend))


def _compressed(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    out, _ = compressed_attention(x["q"], x["k_cmp"], x["v_cmp"], config, backend=backend)
    assert out is not None
    return (out,)


def _select(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    return (select_blocks(x["q"], x["k_cmp"], x["lse"], config, backend=backend),)


def selected_by(algorithm: str) -> Call:
    """Return the selected branch with an algorithm, see :func:`nsa.selected_attention`."""

    def call(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
        inputs = (x["q"], x["k_slc"], x["v_slc"], x["block_indices"])
        return selected_attention(*inputs, config, algorithm=algorithm, backend=backend)[:1]

    return call


def _window(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    return window_attention(x["q"], x["k_win"], x["v_win"], config, backend=backend)[:1]


def _combine(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    return (combine(x["out_cmp"], x["out_slc"], x["out_win"], x["gates"], backend=backend),)


_RANGE = (("range_fwd",), ("range_dq", "range_dkv"))
_OUTS = tuple(f"out_{branch}" for branch in BRANCHES)
_WHOLE = (
    ("compress_fwd", "range_fwd", "select_", "selected_", "combine_fwd"),
    ("compress_dx", "range_dq", "range_dkv", "selected_"),
)
_COMPRESS = (("compress_fwd",), ("compress_dx",))
_SELECTED = (("selected_",), ("selected_",))
_COMBINE = (("combine_fwd",), ("combine_bwd",))
_RAW, _CMP = ("k_cmp_raw", "v_cmp_raw"), ("k_cmp", "v_cmp")
_CASES = (
    Case("attention", WHOLE_INPUTS, _attention, _WHOLE),
    Case("attention.compress", _RAW, compress_and_rotate, _COMPRESS, outputs=_CMP),
    Case("attention.compressed", ("q", *_CMP), _compressed, _RANGE),
    Case("attention.choice", (), _select, (("select_",), ()), outputs=("block_indices",)),
    Case("attention.selected", ("q", "k_slc", "v_slc"), selected_by("auto"), _SELECTED),
    Case("attention.window", ("q", "k_win", "v_win"), _window, _RANGE),
    Case("attention.combine", (*_OUTS, "gates"), _combine, _COMBINE),
)
CASES = {case.name: case for case in _CASES}


@dataclass(frozen=True)
class Problem:
    """A case at a point, with its inputs.

    Attributes:
        case: the operator.
        point: heads, lengths, dtype and device.
        config: the sparse pattern.
        tensors: the inputs, and the gradient of every output (``dout``, ``dk_cmp``, ..).
    """

    case: Case
    point: Point
    config: NSAConfig
    tensors: Tensors

    def named(self, results: Sequence[Tensor], leaves: Iterable[str]) -> Tensors:
        """Map names to results: outputs, then gradients if there are any."""
        names = [*self.case.outputs, *(f"d{name}" for name in leaves)]
        return dict(zip(names, results, strict=len(results) > len(self.case.outputs)))


def prepare(case: Case, base: Tensors, point: Point, config: NSAConfig, backend: str) -> Problem:
    """Make the inputs of a case.

    Args:
        case: the operator.
        base: inputs of whole attention, and ``dout``.
        point: heads, lengths, dtype and device.
        config: the sparse pattern.
        backend: backend that computes compressed keys and lse.
    """
    tensors = dict(base)
    with torch.no_grad():
        if case.name in ("attention.compressed", "attention.choice"):
            tensors["k_cmp"], tensors["v_cmp"] = compress_and_rotate(base, config, backend)
        if case.name == "attention.choice":
            keys = base["q"], tensors["k_cmp"], tensors["v_cmp"]
            tensors["lse"] = compressed_attention(*keys, config, backend=backend)[1]
    if case.name == "attention.compress":
        rows = point.tokens // config.compress_stride
        for seed, name, size in ((3, "dk_cmp", config.head_dim), (4, "dv_cmp", config.value_dim)):
            tensors[name] = normal((rows, config.num_kv_heads, size), point, seed)
    if case.name == "attention.selected":
        tensors["block_indices"] = given_selection(point, config)
    if case.name == "attention.combine":
        for seed, name in enumerate(_OUTS, start=5):
            tensors[name] = normal(tuple(base["dout"].shape), point, seed)
    return Problem(case, point, config, tensors)


# --- Useful work
def pairs(name: str, seq_len: int, config: NSAConfig) -> int:
    """Count the pairs of a query and a visible key in one sequence and head.

    The query's own block is always selected (``num_local_blocks`` is at least 1), so the count
    does not depend on the other blocks.

    Args:
        name: case of a branch, or ``dense``.
        seq_len: S.
        config: the sparse pattern.
    """
    t = torch.arange(seq_len)
    if name == "attention.window":
        return int((t + 1).clamp(max=config.window_size).sum())
    if name == "attention.compressed":
        blocks = (t + 1 - config.compress_block_size) // config.compress_stride + 1
        return int(blocks.clamp(min=0).sum())
    if name == "attention.selected":
        n = torch.full_like(t, config.num_selected_blocks)
        for length, fewer in reversed(config.block_counts):
            n[:length] = fewer
        size = config.block_size
        return int(((torch.minimum(t // size + 1, n) - 1) * size + t % size + 1).sum())
    assert name == "dense"
    return int((t + 1).sum())


def useful_work(problem: Problem, *, backward: bool, dense: bool = False) -> dict[str, int]:
    """Count useful operations (``flops``) of a case, or ``bytes`` if it only moves data.

    A query head of sizes D and Dv needs ``2 D + 2 Dv`` operations per pair forward and
    ``6 D + 4 Dv`` more backward. Whole attention is the sum of its three branches; selection counts
    one product with every visible compressed key. Bytes are each input and output once; backward
    adds their gradients, and the inputs again if needed.
    """
    case, point, config = problem.case, problem.point, problem.config
    branches = ("attention.compressed", "attention.selected", "attention.window")
    heads = point.batch * config.num_heads
    if case.name == "attention.choice":
        scored = pairs(branches[0], point.seq_len, config)
        return {"flops": scored * heads * 2 * config.head_dim}
    counted = {"attention": branches, **{branch: (branch,) for branch in branches}}.get(case.name)
    if counted or dense:
        operations = 2 * config.head_dim + 2 * config.value_dim
        if backward:
            operations += 6 * config.head_dim + 4 * config.value_dim
        names = ("dense",) if dense else counted or ()
        number = sum(pairs(name, point.seq_len, config) for name in names)
        return {"flops": number * heads * operations}
    inputs = sum(problem.tensors[name].nbytes for name in case.inputs)
    outputs = sum(problem.tensors[f"d{name}"].nbytes for name in case.outputs)
    again = inputs if case.name == "attention.combine" else 0
    return {"bytes": inputs + outputs + backward * (inputs + outputs + again)}
