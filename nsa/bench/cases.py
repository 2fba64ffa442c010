"""Benchmark cases: shapes, inputs, calls and useful work."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from nsa.attention import AttentionInputs, attend, native_sparse_attention
from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._operator import Call as Arguments
from nsa.ops._sequences import Sequences, pack
from nsa.ops.combination import combine
from nsa.ops.compression import Raw, run_compress
from nsa.ops.index_loss import IndexLossInputs, run_index_loss
from nsa.ops.range import compressed_attention, window_attention
from nsa.ops.selected import selected_attention
from nsa.ops.selection import select_blocks
from nsa.ops.selection.reference import choose_blocks
from nsa.rope import Rope
from nsa.testing import make_inputs

Tensors = dict[str, Tensor]
Call = Callable[[Tensors, NSAConfig, str], Any]
MODES = ("fwd", "fwd_bwd")
# Number of neighbouring queries with the same selection, by value of the field `choice`; those of a
# trained model are read from a file.
CHOICES = {"random": 1, "shared4": 4, "shared16": 16, "recorded": 1}
# Noise relative to the common direction of queries that share a selection, so that they differ but
# select (nearly) the same blocks.
OWN_NOISE = 0.03
_CHUNK_ELEMENTS = 2**27
BRANCHES = {"attention.compressed": "cmp", "attention.selected": "slc", "attention.window": "win"}
WHOLE_INPUTS = ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win", "gates")
INDEX_INPUTS = ("q_idx", "k_idx")


# --- Shapes and inputs
# Hq, Hkv, D, Dv of named shapes.
SHAPES = {"seed": (12, 2, 64, 64), "wide": (64, 4, 128, 128), "paper": (64, 4, 192, 128)}
TOKENS = {"seed": 65_536}  # default total of all sequences; otherwise one sequence


def parse_shape(text: str) -> NSAConfig:
    """Default pattern with the heads of ``seed``, ``wide``, ``paper`` or ``HqxHkvxDxDv``.

    The pattern is l, d, l', n, w = 32, 16, 64, 16, 512 and phi mean.
    """
    fits = text in SHAPES or re.fullmatch(r"\d+(x\d+){3}", text) is not None
    rule, hint = f"be one of {', '.join(SHAPES)}, or HqxHkvxDxDv", "For example: 12x2x64x64"
    check(fits, "--shape", rule, repr(text), hint)
    num_heads, num_kv_heads, head_dim, value_dim = SHAPES.get(text) or map(int, text.split("x"))
    return NSAConfig(num_heads, num_kv_heads, head_dim, value_dim)


@dataclass(frozen=True)
class Point:
    """Heads, lengths, selection, dtype and device of a measurement.

    Attributes:
        shape: name of the heads in rows.
        config: the sparse pattern.
        seq_len: S, query and key tokens of a sequence.
        batch: B, number of sequences.
        choice: a key of ``CHOICES``.
        dtype: dtype of all float tensors.
        device: the measured device.
        recorded: file of ``nsa inspect --record``, for choice ``recorded``.
    """

    shape: str
    config: NSAConfig
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
        named = {name: getattr(self, name) for name in ("shape", "choice", "seq_len", "batch")}
        return {**named, "dtype": str(self.dtype).removeprefix("torch.")}


def batch_of(shape: str, seq_len: int, tokens: int | None) -> int:
    """Return the number of sequences in ``tokens`` (None: the shape's tokens, or one sequence)."""
    return max(1, (TOKENS.get(shape, 0) if tokens is None else tokens) // seq_len)


def make_tensors(point: Point) -> Tensors:
    """Make inputs of whole attention, dense ``[B, S, H, D]``, and the gradient ``dout``.

    Tensors are Gaussian, gates uniform. With a shared selection, the queries of each aligned group
    have a common direction and 3% noise.
    """
    batch, config = (point.batch, point.seq_len), point.config
    lengths = [point.seq_len] * point.batch
    packed = make_inputs(config, lengths, dtype=point.dtype, device=point.device)
    tensors = {name: getattr(packed, name).unflatten(0, batch) for name in WHOLE_INPUTS}
    group, q = CHOICES[point.choice], tensors["q"]
    if group > 1:
        first = torch.arange(q.shape[1], device=q.device) // group * group
        tensors["q"] = (q[:, first].float() + OWN_NOISE * q.float()).to(q.dtype)
    tensors["dout"] = normal((*batch, config.num_heads, config.value_dim), point, seed=1)
    return tensors


def normal(shape: tuple[int, ...], point: Point, seed: int) -> Tensor:
    """Draw Gaussian numbers in fp32 and round them to the point's dtype."""
    generator = torch.Generator(device=point.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=point.device).to(point.dtype)


def random_selection(point: Point) -> Tensor:
    """Random block indices for the selected branch alone, int32 ``[B, S, Hkv, n]``.

    Selections contain the forced blocks and random ones, ascending, with -1 at the end. Each
    aligned group of queries with a shared selection is drawn once and is within one block.
    """
    config = point.config
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


def recorded_selection(point: Point) -> Tensor:
    """Block indices that a model has selected, int32 ``[B, S, Hkv, n]``.

    Each sequence has those of the next layer. Queries do not depend on what follows them.
    """
    import numpy as np  # not of the core, whose `nsa doctor` reads shapes from here

    config, path, hint = point.config, point.recorded, "nsa inspect RUN --record makes one."
    assert path is not None
    try:
        with np.load(path) as arrays:
            size = arrays["block_size"].tolist()
            layers = [arrays[name] for name in arrays if name != "block_size"]
        num_kv_heads, n, length = layers[0].shape
    except (BadZipFile, OSError, LookupError, ValueError):
        fail("--recorded", "be a file of recorded selections", path, hint)
    wanted = (config.num_kv_heads, config.num_selected_blocks, config.block_size)
    rule = f"have {wanted} KV heads, blocks of a query and tokens of a block"
    check((num_kv_heads, n, size) == wanted, "--recorded", rule, (num_kv_heads, n, size))
    rule = f"be at most the {length:,} recorded tokens"
    check(point.seq_len <= length, "--seqs", rule, point.seq_len)
    parts = [layers[b % len(layers)][..., : point.seq_len] for b in range(point.batch)]
    found = torch.from_numpy(np.stack(parts)).permute(0, 3, 1, 2).contiguous()
    return found.to(point.device)


# --- Operators
@dataclass(frozen=True)
class Case:
    """One operator, or whole attention.

    Attributes:
        name: name in rows.
        inputs: names of the inputs with gradients; empty if there is no backward pass.
        call: ``(tensors, config, backend) -> output``, or a tuple of outputs.
        kernels: name prefixes of its kernels, forward and backward.
        outputs: names of the outputs.
        is_whole: whether it computes whole attention.
    """

    name: str
    inputs: tuple[str, ...]
    call: Call
    kernels: tuple[tuple[str, ...], tuple[str, ...]]
    outputs: tuple[str, ...] = ("out",)
    is_whole: bool = False

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of the case: ``fwd``, and ``fwd_bwd`` if it has a backward pass."""
        return MODES if self.inputs else MODES[:1]


def shares_keys(config: NSAConfig) -> bool:
    """Whether the window has the keys and values of the selected branch."""
    return config.share_kv and {"slc", "win"} <= {*config.branches}


def with_window(x: Tensors, config: NSAConfig) -> Tensors:
    """Inputs of whole attention, with shared keys and values if the pattern shares them."""
    return {**x, "k_win": x["k_slc"], "v_win": x["v_slc"]} if shares_keys(config) else x


def _attention(x: Tensors, config: NSAConfig, backend: str) -> Tensor:
    call: Callable[..., Tensor] = native_sparse_attention
    x = with_window(x, config)
    inputs = (x[name] for name in WHOLE_INPUTS)
    index = {name: x[name] for name in INDEX_INPUTS if name in x}
    return call(*inputs, None, config, **index, rope=Rope.from_config(config), backend=backend)


def _attention_with_loss(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, Tensor]:
    """Whole attention, and the loss of its index over the selected blocks, as in training."""
    packed = {name: pack(x[name]) for name in (*WHOLE_INPUTS, *INDEX_INPUTS)}
    inputs = AttentionInputs(phi=None, **with_window(packed, config))
    batch, length, device = *x["q"].shape[:2], x["q"].device
    sequences = Sequences(None, batch, length, length, device, (batch, length))
    call = Arguments(config, sequences, config.head_dim**-0.5)
    result = attend(inputs, call, rope=Rope.from_config(config), backend=backend)
    q_idx, k_idx, *others = (packed[name] for name in (*INDEX_INPUTS, "q", "k_slc"))
    q, k = (y.detach() for y in others)
    given = IndexLossInputs(q_idx, k_idx, q, k, result.block_indices, result.lse_slc, result.order)
    return sequences.restore(result.out), run_index_loss(given, call, backend).total


def _compress(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    """Compressed rotated keys, and compressed values."""
    k, v = (x[name] for name in _RAW)
    batch, length = k.shape[:2]
    sequences = Sequences(None, batch, length, length, k.device, (batch, length))
    raw = [Raw(pack(k), None, Rope.from_config(config)), Raw(pack(v), None, None)]
    return tuple(run_compress(raw, config, sequences, backend))


def _compressed(x: Tensors, config: NSAConfig, backend: str) -> Any:
    return compressed_attention(x["q"], x["k_cmp"], x["v_cmp"], config, backend=backend)


def scored(x: Tensors, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Queries and keys that score blocks."""
    if config.has_index:
        return x["q_idx"], x["k_idx"]
    return x["q"], x["k_cmp" if config.scores == "compressed" else "k_slc"]


def _select(x: Tensors, config: NSAConfig, backend: str) -> Tensor:
    return select_blocks(*scored(x, config), x.get("lse"), config, backend=backend)


def _selected(x: Tensors, config: NSAConfig, backend: str) -> Tensor:
    inputs = (x["q"], x["k_slc"], x["v_slc"], x["block_indices"])
    return selected_attention(*inputs, config, backend=backend)[0]


def _window(x: Tensors, config: NSAConfig, backend: str) -> Tensor:
    return window_attention(x["q"], x["k_win"], x["v_win"], config, backend=backend)[0]


def _combine(x: Tensors, config: NSAConfig, backend: str) -> Tensor:
    return combine(x["out_cmp"], x["out_slc"], x["out_win"], x["gates"], backend=backend)


_RAW, _CMP = ("k_cmp_raw", "v_cmp_raw"), ("k_cmp", "v_cmp")
_OUTS = ("out_cmp", "out_slc", "out_win")
_COMPRESS = (("compress_fwd",), ("compress_dx",))
_COMBINE = (("combine_fwd",), ("combine_bwd",))
_RANGE = (("range_fwd",), ("range_dq", "range_dkv"))
_WHOLE = (
    ("compress_fwd", "range_fwd", "select_", "selected_", "combine_fwd"),
    ("compress_dx", "range_dq", "range_dkv", "selected_"),
)
_SELECTED = (("selected_",), ("selected_",))
_CASES = (
    Case("attention", WHOLE_INPUTS, _attention, _WHOLE, is_whole=True),
    Case(
        "attention.with_index_loss",
        (*WHOLE_INPUTS, *INDEX_INPUTS),
        _attention_with_loss,
        ((*_WHOLE[0], "index_loss"), _WHOLE[1]),
        ("out", "index_loss"),
        is_whole=True,
    ),
    Case("attention.compress", _RAW, _compress, _COMPRESS, _CMP),
    Case("attention.compressed", ("q", *_CMP), lambda *x: _compressed(*x)[0], _RANGE),
    Case("attention.choice", (), _select, (("select_",), ())),
    Case("attention.selected", ("q", "k_slc", "v_slc"), _selected, _SELECTED),
    Case("attention.window", ("q", "k_win", "v_win"), _window, _RANGE),
    Case("attention.combine", (*_OUTS, "gates"), _combine, _COMBINE),
)
CASES = {case.name: case for case in _CASES}


@dataclass(frozen=True)
class Problem:
    """A case at a point, with its inputs.

    Attributes:
        case: the operator.
        point: pattern, lengths, dtype and device.
        tensors: the inputs, and the gradient of each output, such as ``dout``.
    """

    case: Case
    point: Point
    tensors: Tensors


def prepare(case: Case, base: Tensors, point: Point, backend: str) -> Problem:
    """Make the inputs of a case.

    Args:
        case: the operator.
        base: inputs of whole attention, and ``dout``.
        point: pattern, lengths, dtype and device.
        backend: backend that computes compressed keys and lse.
    """
    tensors, config = dict(base), point.config
    if case.name == "attention.selected":
        is_recorded = point.choice == "recorded"
        select = recorded_selection if is_recorded else random_selection
        tensors["block_indices"] = select(point)
    if config.has_index and (case.is_whole or case.name == "attention.choice"):
        heads, tokens = config.scoring, (point.batch, point.seq_len)
        for seed, name, number in ((8, "q_idx", heads.num_heads), (9, "k_idx", heads.num_kv_heads)):
            tensors[name] = normal((*tokens, number, heads.head_dim), point, seed)
    if "index_loss" in case.outputs:
        tensors["dindex_loss"] = torch.ones((), device=point.device)
    by_keys = case.name == "attention.choice" and config.scores == "compressed"
    if case.name == "attention.compressed" or by_keys:
        with torch.no_grad():
            tensors |= zip(_CMP, _compress(tensors, config, backend), strict=True)
            tensors["lse"] = _compressed(tensors, config, backend)[1]
    if case.name == "attention.compress":
        rows = point.tokens // config.compress_stride
        for seed, name, size in ((3, "dk_cmp", config.head_dim), (4, "dv_cmp", config.value_dim)):
            tensors[name] = normal((rows, config.num_kv_heads, size), point, seed)
    if case.name == "attention.combine":
        for seed, name in enumerate(_OUTS, start=5):
            tensors[name] = normal(tuple(base["dout"].shape), point, seed)
    return Problem(case, point, tensors)


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
        n, size = selected_counts(t, config), config.block_size
        return int(((torch.minimum(t // size + 1, n) - 1) * size + t % size + 1).sum())
    assert name == "dense"
    return int((t + 1).sum())


def selected_counts(t: Tensor, config: NSAConfig) -> Tensor:
    """Return the maximum number of selected blocks of queries at positions ``t``."""
    n = torch.full_like(t, config.num_selected_blocks)
    for length, fewer in reversed(config.block_counts):
        n = torch.where(t < length, fewer, n)
    return n


def useful_work(problem: Problem, mode: str, *, dense: bool = False) -> dict[str, int]:
    """Count the useful operations (``flops``) of a case, or ``bytes`` if it only moves data.

    A query head of sizes D and Dv needs ``2 D + 2 Dv`` operations per pair forward and
    ``6 D + 4 Dv`` more backward. Whole attention is the sum of its branches; selection counts
    one product with every visible compressed key. With ``token_max`` and ``index`` it is one with
    every visible token, which whole attention counts, too. The loss of an index is not counted.
    Bytes are each input and output once; a backward pass adds their gradients, and the inputs again
    if it needs them.
    """
    if problem.case.name in ("attention.compress", "attention.combine"):
        return {"bytes": _moved_bytes(problem, mode)}
    name, config, is_whole = problem.case.name, problem.point.config, problem.case.is_whole
    size, value_size = config.head_dim, config.value_dim
    operations = 2 * size + 2 * value_size
    if mode == "fwd_bwd":
        operations += 6 * size + 4 * value_size
    seq_len, heads = problem.point.seq_len, config.scoring
    counted: tuple[str, ...] = (name,)
    scores = 0
    by_token = heads.scores == "token_max" and (is_whole or name == "attention.choice")
    if by_token and not dense:
        scores = 2 * heads.head_dim * heads.num_heads * pairs("dense", seq_len, config)
    if name == "attention.choice":
        counted, operations = () if scores else ("attention.compressed",), 2 * size
    if is_whole:
        counted = tuple(case for case, branch in BRANCHES.items() if branch in config.branches)
    if dense:
        counted = ("dense",)
    number = sum(pairs(each, seq_len, config) for each in counted)
    return {"flops": (number * operations * config.num_heads + scores) * problem.point.batch}


def _moved_bytes(problem: Problem, mode: str) -> int:
    case, x = problem.case, problem.tensors
    inputs = sum(x[name].nbytes for name in case.inputs)
    moved = inputs + sum(x[f"d{name}"].nbytes for name in case.outputs)
    again = inputs if case.name == "attention.combine" else 0
    return moved + (moved + again if mode == "fwd_bwd" else 0)
