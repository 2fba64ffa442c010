"""The measured operators: which inputs they take, how they are called, what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention import native_sparse_attention
from nsa.bench.points import Point, hand_made_choice, normal
from nsa.config import NSAConfig
from nsa.ops._sequences import Sequences, pack
from nsa.ops.combination import combine
from nsa.ops.compressed import compressed_attention
from nsa.ops.compression import run_compress
from nsa.ops.selected import selected_attention
from nsa.ops.selection import select_blocks
from nsa.ops.window import window_attention
from nsa.rope import Rope

Tensors = dict[str, Tensor]
MODES = ("fwd", "fwd_bwd")


@dataclass(frozen=True)
class Case:
    """One operator, or the whole.

    Attributes:
        name: as in a row.
        inputs: names of the tensors that take gradients, in the order of the gradients.
        outputs: names of what it gives; with gradients unless the case has no backward pass.
        call: ``(tensors, config, backend) -> outputs``.
        kernels: what the names of its own kernels begin with: one of each forward, and backward.
        providers: besides ours and the reference.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: Callable[[Tensors, NSAConfig, str], tuple[Tensor, ...]]
    kernels: tuple[tuple[str, ...], tuple[str, ...]]
    providers: tuple[str, ...] = ()

    @property
    def modes(self) -> tuple[str, ...]:
        """Forward, and forward with backward where there is one."""
        return MODES if self.inputs else MODES[:1]


def _attention(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    out = native_sparse_attention(
        x["q"], x["k_cmp_raw"], x["v_cmp_raw"], x["k_slc"], x["v_slc"], x["k_win"], x["v_win"], x["gates"], None, config,
        rope=Rope.from_config(config), backend=backend,
    )  # fmt: skip
    return (out,)


def compress_and_rotate(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    """k_cmp, rotated, and v_cmp, of a dense batch: as whole attention does it."""
    k, v = x["k_cmp_raw"], x["v_cmp_raw"]
    alike = Sequences(None, k.shape[0], k.shape[1], k.shape[1], k.device, (k.shape[0], k.shape[1]))
    k_cmp = run_compress(pack(k), None, config, alike, Rope.from_config(config), backend)
    return k_cmp, run_compress(pack(v), None, config, alike, None, backend)


def _compressed(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    out, _ = compressed_attention(x["q"], x["k_cmp"], x["v_cmp"], config, backend=backend)
    assert out is not None
    return (out,)


def _choice(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    return (select_blocks(x["q"], x["k_cmp"], x["lse"], config, backend=backend),)


def selected_by(algorithm: str) -> Callable[[Tensors, NSAConfig, str], tuple[Tensor, ...]]:
    """The selected branch with its algorithm, see :func:`nsa.selected_attention`."""

    def call(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
        inputs = (x["q"], x["k_slc"], x["v_slc"], x["block_indices"])
        return (selected_attention(*inputs, config, algorithm=algorithm, backend=backend)[0],)

    return call


def _window(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    return (window_attention(x["q"], x["k_win"], x["v_win"], config, backend=backend)[0],)


def _combine(x: Tensors, config: NSAConfig, backend: str) -> tuple[Tensor, ...]:
    return (combine(x["out_cmp"], x["out_slc"], x["out_win"], x["gates"], backend=backend),)


_WHOLE_INPUTS = ("q", "k_cmp_raw", "v_cmp_raw", "k_slc", "v_slc", "k_win", "v_win", "gates")

CASES = {
    case.name: case
    for case in (
        Case(
            "attention", _WHOLE_INPUTS, ("out",), _attention,
            (("compress_fwd", "range_fwd", "select_", "selected_", "combine_fwd"),
             ("compress_dx", "range_dq", "range_dkv", "selected_")),
            ("dense-cudnn", "dense-fa2", "flex"),
        ),
        Case(
            "attention.compress", ("k_cmp_raw", "v_cmp_raw"), ("k_cmp", "v_cmp"), compress_and_rotate,
            (("compress_fwd",), ("compress_dx",)),
        ),
        Case(
            "attention.compressed", ("q", "k_cmp", "v_cmp"), ("out",), _compressed,
            (("range_fwd",), ("range_dq", "range_dkv")),
        ),
        Case("attention.choice", (), ("block_indices",), _choice, (("select_",), ())),
        Case(
            "attention.selected", ("q", "k_slc", "v_slc"), ("out",), selected_by("auto"), (("selected_",), ("selected_",)),
            ("mask", "ranges", "gather", "tiled", "gathered"),
        ),
        Case(
            "attention.window", ("q", "k_win", "v_win"), ("out",), _window, (("range_fwd",), ("range_dq", "range_dkv")),
            ("flex",),
        ),
        Case(
            "attention.combine", ("out_cmp", "out_slc", "out_win", "gates"), ("out",), _combine,
            (("combine_fwd",), ("combine_bwd",)),
        ),
    )
}  # fmt: skip


def prepare(case: Case, base: Tensors, point: Point, config: NSAConfig, backend: str) -> Tensors:
    """Everything that a case takes, made outside what is timed.

    Args:
        case: the operator.
        base: the inputs of whole attention, and ``dout``.
        point: where it is measured.
        config: the sparse pattern.
        backend: makes the compressed keys and lse.

    Returns:
        ``base``, with the case's own inputs and the gradient of every output (``dout`` of ``out``, ``dk_cmp``, ``dv_cmp``).
    """
    tensors = dict(base)
    with torch.no_grad():
        if case.name in ("attention.compressed", "attention.choice"):
            tensors["k_cmp"], tensors["v_cmp"] = compress_and_rotate(base, config, backend)
        if case.name == "attention.choice":
            tensors["lse"] = compressed_attention(base["q"], tensors["k_cmp"], tensors["v_cmp"], config, backend=backend)[1]
    if case.name == "attention.compress":
        rows = point.tokens // config.compress_stride
        for seed, name, size in ((3, "dk_cmp", config.head_dim), (4, "dv_cmp", config.value_dim)):
            tensors[name] = normal((rows, config.num_kv_heads, size), point, seed)
    if case.name == "attention.selected":
        tensors["block_indices"] = hand_made_choice(point, config)
    if case.name == "attention.combine":
        shape = tuple(base["dout"].shape)
        for seed, branch in ((5, "cmp"), (6, "slc"), (7, "win")):
            tensors[f"out_{branch}"] = normal(shape, point, seed)
    return tensors
