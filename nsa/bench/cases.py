"""The measured operators: which inputs they take, how they are called, what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention import native_sparse_attention
from nsa.bench.points import WHOLE_INPUTS, Point, given_selection, normal
from nsa.config import BRANCHES, NSAConfig
from nsa.ops._sequences import Sequences, pack
from nsa.ops.combination import combine
from nsa.ops.compression import Raw, run_compress
from nsa.ops.range import compressed_attention, window_attention
from nsa.ops.selected import selected_attention
from nsa.ops.selection import select_blocks
from nsa.rope import Rope

Tensors = dict[str, Tensor]
Call = Callable[[Tensors, NSAConfig, str], tuple[Tensor, ...]]
MODES = ("fwd", "fwd_bwd")


@dataclass(frozen=True)
class Case:
    """One operator, or the whole.

    Attributes:
        name: as in a row.
        inputs: names of the tensors that take gradients, in the order of the gradients.
        call: ``(tensors, config, backend) -> outputs``.
        kernels: what the names of its own kernels begin with: one of each forward, and backward.
        outputs: names of what it gives; with gradients unless the case has no backward pass.
    """

    name: str
    inputs: tuple[str, ...]
    call: Call
    kernels: tuple[tuple[str, ...], tuple[str, ...]]
    outputs: tuple[str, ...] = ("out",)

    @property
    def modes(self) -> tuple[str, ...]:
        """Forward, and forward with backward where there is one."""
        return MODES if self.inputs else MODES[:1]


def _attention(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    call: Callable[..., Tensor] = native_sparse_attention
    inputs = (x[name] for name in WHOLE_INPUTS)
    return (call(*inputs, None, config, rope=Rope.from_config(config), backend=backend),)


def compress_and_rotate(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    """k_cmp, rotated, and v_cmp, of a dense batch: as whole attention computes them."""
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
    """The selected branch with an algorithm, see :func:`nsa.selected_attention`."""

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
_CASES = (
    Case("attention", WHOLE_INPUTS, _attention, _WHOLE),
    Case(
        "attention.compress",
        ("k_cmp_raw", "v_cmp_raw"),
        compress_and_rotate,
        _COMPRESS,
        outputs=("k_cmp", "v_cmp"),
    ),
    Case("attention.compressed", ("q", "k_cmp", "v_cmp"), _compressed, _RANGE),
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
        point: where it is measured.
        config: the sparse pattern.
        tensors: the inputs, and the gradient of every output (``dout`` of ``out``, ``dk_cmp``, ..).
    """

    case: Case
    point: Point
    config: NSAConfig
    tensors: Tensors

    def named(self, results: Sequence[Tensor], leaves: Iterable[str]) -> Tensors:
        """Results by name: outputs, then gradients where there are any."""
        names = [*self.case.outputs, *(f"d{name}" for name in leaves)]
        return dict(zip(names, results, strict=len(results) > len(self.case.outputs)))


def prepare(case: Case, base: Tensors, point: Point, config: NSAConfig, backend: str) -> Problem:
    """Everything that a case takes, made outside what is timed.

    Args:
        case: the operator.
        base: the inputs of whole attention, and ``dout``.
        point: where it is measured.
        config: the sparse pattern.
        backend: makes the compressed keys and lse.
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
