"""Calls of other packages on this benchmark's inputs.

Shapes: B sequences of S tokens; queries ``[B, S, Hq, D]``, keys and values ``[B, S, Hkv, D]``,
block indices int32 ``[B, S, Hkv, n]``, ascending, with -1 at the end, gates ``[B, S, Hq, 3]``. A
package is imported when it is called: one that is not installed costs a row, not the run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.attention import native_sparse_attention
from nsa.bench.attention import PROVIDERS, Provider, Work, flex_attention
from nsa.bench.cases import CASES, Point, Problem
from nsa.bench.clock import UnsupportedError
from nsa.bench.consumers import CONSUMERS
from nsa.config import NSAConfig
from nsa.ops.compression import compress
from nsa.ops.range import compressed_attention
from nsa.ops.selection import select_blocks

SELECTED, WINDOW, WHOLE = ("attention.selected",), ("attention.window",), ("attention",)
Branches = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Peer(Provider):
    """A package that is measured.

    Attributes:
        package: distribution or repository, as named in rows.
        module: module that is imported before the call.
        backward: whether it has a backward pass.
        whole: whole attention with one K and V for all branches,
            ``(q, k, v, gates, config, window) -> out``.
        select: block indices that ``whole`` selects, ``(q, k, v, config) -> ids``.
    """

    package: str = "torch"
    module: str = "torch"
    backward: bool = True
    whole: Callable[..., Tensor] | None = None
    select: Callable[..., Tensor] | None = None

    def work(self, problem: Problem, mode: str) -> Work:
        """Prepare a problem.

        Raises:
            UnsupportedError: the package is not installed, or has no backward pass.
        """
        try:
            import_module(self.module)
        except ImportError as error:
            raise UnsupportedError(f"cannot import {self.module}: {error}") from error
        if mode == "fwd_bwd" and not self.backward:
            raise UnsupportedError("it has no backward pass")
        if self.whole is None:
            return super().work(problem, mode)
        needs_grad = mode == "fwd_bwd"
        names, tensors = problem.case.inputs, problem.tensors
        inputs = {name: tensors[name].detach().requires_grad_(needs_grad) for name in names}
        given = (problem.point.config, shared_window(problem))
        forward = partial(self.whole, *inputs.values(), *given)
        return Work(forward, inputs if needs_grad else {}, {"out": tensors["dout"]})


def version(peer: Peer) -> str | None:
    """Version of the distribution, or the commit of the checkout in ``PYTHONPATH``.

    A source tree without git names its commit in a file ``COMMIT`` at its root. None for this
    library, whose commit every row has, and for a package that is not installed.
    """
    if peer.module == "nsa":
        return None
    for name in metadata.distributions(name=peer.package):
        return name.version
    spec = find_spec(peer.module.partition(".")[0])  # does not run the package
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0]).parent
    if (root / "COMMIT").is_file():
        return (root / "COMMIT").read_text("utf-8").strip()
    git = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None


# --- Layouts
def offsets(x: Tensor) -> Tensor:
    """``cu_seqlens`` int32 ``[B + 1]`` of a tensor ``[B, S, ...]``."""
    batch, length = x.shape[:2]
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=x.device)


def by_head(ids: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Block indices ``[Hkv, B * S, n]``, and ``cu_seqlens``."""
    return ids.flatten(0, 1).transpose(0, 1).contiguous(), offsets(ids)


def by_token(ids: Tensor, x: Tensor) -> Tensor:
    """Block indices ``[B, S, Hkv, n]`` from ``[Hkv, B * S, n]``, for a tensor ``[B, S, ...]``."""
    return ids.transpose(0, 1).unflatten(0, x.shape[:2])


def packed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[B * S, ...]`` from ``[B, S, ...]``."""
    return tuple(x.flatten(0, 1) for x in tensors)


def gated(outs: Branches, gates: Tensor) -> Tensor:
    """Sum of the compressed, selected and window branch with their gates."""
    cmp, slc, win = (out * gates[..., i, None] for i, out in enumerate(outs))
    return cmp + slc + win


def shared_window(problem: Problem) -> Callable[..., Tensor]:
    """Window of packages that leave it to flash-attn: flash-attn, or FlexAttention without it."""
    size = problem.point.config.window_size
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        attend = _flex_window(problem.point)
        return lambda *x: attend(*(y.transpose(1, 2) for y in x)).transpose(1, 2)
    return partial(flash_attn_func, causal=True, window_size=(size - 1, 0))


@lru_cache(maxsize=1)
def _flex_window(point: Point) -> Callable[..., Tensor]:
    return flex_attention(Problem(CASES[WINDOW[0]], point, {}))


# --- This library
def nsa_whole(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, config: NSAConfig, _window: object
) -> Tensor:
    """Whole attention of this library."""
    call: Callable[..., Tensor] = native_sparse_attention
    return call(q, k, v, k, v, k, v, gates, None, config)


def nsa_select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    """Selection of this library."""
    k_cmp, v_cmp = (compress(x, None, config)[0] for x in (k, v))
    lse = compressed_attention(q, k_cmp, v_cmp, config)[1]
    return select_blocks(q, k_cmp, lse, config)


# --- flash-linear-attention
def fla_selected(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, ids: Tensor) -> Tensor:
    """``parallel_nsa`` without the mean pooling of K and V, which it always computes.

    A group of query heads is padded to a power of two of at least 16.
    """
    from fla.ops.nsa.parallel import ParallelNSAFunction

    group = config.group_size
    rows = max(16, 1 << (group - 1).bit_length())
    q = pad(q.unflatten(2, (-1, group)), (0, 0, 0, rows - group)).flatten(2, 3)
    given = (config.num_selected_blocks, config.block_size, config.head_dim**-0.5, None)
    out: Tensor = ParallelNSAFunction.apply(q, k, v, ids, *given)
    return out.unflatten(2, (-1, rows))[..., :group, :].flatten(2, 3)


def fla_whole(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, config: NSAConfig, window: Callable[..., Tensor]
) -> Tensor:
    """``parallel_nsa``, and the window, which it takes from flash-attn."""
    from fla.ops.nsa import parallel_nsa

    cmp, slc, win = gates.unbind(-1)
    sizes = {"block_counts": config.num_selected_blocks, "block_size": config.block_size}
    out: Tensor = parallel_nsa(q, k, v, cmp, slc, **sizes)
    return torch.addcmul(out, window(q, k, v), win[..., None])


def fla_select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    """Selection of ``parallel_nsa``."""
    from fla.ops.nsa.compression import parallel_nsa_compression
    from fla.ops.nsa.parallel import parallel_nsa_topk
    from fla.ops.utils.pooling import mean_pooling

    size, scale, length = config.block_size, config.head_dim**-0.5, k.shape[1]
    k_cmp, v_cmp = mean_pooling(k, size), mean_pooling(v, size)
    lse = parallel_nsa_compression(q, k_cmp, v_cmp, length, size, scale)[1]
    ids: Tensor = parallel_nsa_topk(q, k_cmp, length, lse, config.num_selected_blocks, size, scale)
    return ids


# --- native-sparse-attention-triton, and FSA, which contains a copy of it
def _operators(name: str, config: NSAConfig) -> tuple[Callable[..., Any], ...]:
    """Operators ``selected``, ``compressed`` and ``pool`` of a package.

    FSA's module uses its own selected branch for groups of at most 8 query heads.
    """
    ops: Any = import_module("nsa_ref.ops" if name == "fsa" else "native_sparse_attention.ops")
    selected = ops.topk_sparse_attention
    if name == "fsa" and config.group_size <= 8:
        selected = import_module("fsa.ops").FSA_topk_sparse_attention
    return selected, ops.compressed_attention, ops.avgpool_compress


def topk_selected(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, made: tuple[Tensor, Tensor], *, name: str
) -> Tensor:
    """``topk_sparse_attention``."""
    (ids, cu_seqlens), selected = made, _operators(name, config)[0]
    out: Tensor = selected(*packed(q, k, v), ids, config.block_size, cu_seqlens)
    return out.view_as(q)


def topk_compressed(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, *, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compressed branch, block indices ``[Hkv, B * S, n]`` and ``cu_seqlens``."""
    _, compressed, pool = _operators(name, config)
    cu_seqlens, length = offsets(q), q.shape[1]
    sizes = config.compress_block_size, config.compress_stride
    q, k, v = packed(q, k, v)
    (k_cmp, cu_cmp), (v_cmp, _) = (pool(x, None, cu_seqlens, *sizes) for x in (k, v))
    blocks = config.block_size, config.num_selected_blocks
    lengths = length, (length - sizes[0]) // sizes[1] + 1
    forced = {"init_blocks": config.num_init_blocks, "local_blocks": config.num_local_blocks}
    out, ids = compressed(
        q, k_cmp, v_cmp, *sizes, *blocks, cu_seqlens, cu_cmp, *lengths, None, **forced
    )
    return out, ids, cu_seqlens


def topk_whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    config: NSAConfig,
    window: Callable[..., Tensor],
    *,
    name: str,
) -> Tensor:
    """The steps of the package's module after its projections and rotation."""
    cmp, ids, cu_seqlens = topk_compressed(q, k, v, config, name=name)
    slc = topk_selected(q, k, v, config, (ids, cu_seqlens), name=name)
    return gated((cmp.view_as(q), slc, window(q, k, v)), gates)


def topk_select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, *, name: str) -> Tensor:
    """Selection of ``compressed_attention``."""
    return by_token(topk_compressed(q, k, v, config, name=name)[1], q)


# --- flash-nsa
def flash_lengths(x: Tensor, config: NSAConfig) -> None:
    """Set pattern and lengths, which flash-nsa stores globally."""
    from flash_nsa import NSAHelper

    NSAHelper.set_hyperparameters(
        config.compress_block_size,
        config.compress_stride,
        config.block_size,
        config.window_size,
        config.num_selected_blocks,
        config.num_init_blocks,
        config.num_local_blocks,
    )
    NSAHelper.init_cu_seqlens(offsets(x))


def flash_made(ids: Tensor, config: NSAConfig) -> Tensor:
    """Block indices ``[Hkv, B * S, n]``."""
    flash_lengths(ids, config)
    return by_head(ids, config)[0]


def flash_selected(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, ids: Tensor) -> Tensor:
    """``select_attn``."""
    from flash_nsa import select_attn

    out: Tensor = select_attn(*packed(q, k, v), ids)
    return out.view_as(q)


def flash_compressed(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Compressed branch and block indices ``[Hkv, B * S, n]``."""
    from flash_nsa import compress_attn, mean_pooling, slc_topk_indices

    flash_lengths(q, config)
    q, k, v = packed(q, k, v)
    k_cmp, v_cmp = mean_pooling(k), mean_pooling(v)
    out, lse = compress_attn(q, k_cmp, v_cmp)
    return out, slc_topk_indices(q, k_cmp, lse, maybe_efficient_version=True)[0]


def flash_whole(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, config: NSAConfig, window: Callable[..., Tensor]
) -> Tensor:
    """The steps of ``HFNSACore``, whose own window has one token more; it applies a sigmoid."""
    from flash_nsa.ops.combine import fused_sigmoid_combine

    cmp, ids = flash_compressed(q, k, v, config)
    slc = flash_selected(q, k, v, config, ids).flatten(0, 1)
    win = window(q, k, v).flatten(0, 1)
    logits = torch.logit(gates.float()).flatten(0, 1)
    out: Tensor = fused_sigmoid_combine(cmp, slc, win, logits)
    return out.view_as(q)


def flash_select(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    """Selection of ``slc_topk_indices``, which pads with the number of blocks."""
    ids = by_token(flash_compressed(q, k, v, config)[1], q)
    return torch.where(ids * config.block_size < q.shape[1], ids, -1)


# --- cuDNN frontend, FlashAttention-4
def cudnn_made(ids: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Block indices ``[B * S, Hkv, n]``, their counts and ``cu_seqlens``."""
    return ids.flatten(0, 1), (ids >= 0).sum(-1, dtype=torch.int32).flatten(0, 1), offsets(ids)


def cudnn_selected(
    q: Tensor, k: Tensor, v: Tensor, config: NSAConfig, made: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """``selection_attention_wrapper``, forward only."""
    from cudnn import NSA

    ids, counts, cu_seqlens = made
    lengths = {"max_s_q": q.shape[1], "max_s_k": q.shape[1], "is_causal": True}
    sizes = {"block_size": config.block_size, "scale_softmax": config.head_dim**-0.5}
    given = (*packed(q, k, v), ids, counts, cu_seqlens, cu_seqlens)
    out: Tensor = NSA.selection_attention_wrapper(*given, **sizes, **lengths)["o_tensor"]
    return out.view_as(q)


def fa4_window(problem: Problem) -> Callable[..., Tensor]:
    """FlashAttention-4's window over ``[B, H, S, D]``."""
    from flash_attn.cute import flash_attn_func

    size = problem.point.config.window_size

    def attend(*tensors: Tensor) -> Tensor:
        inputs = (x.transpose(1, 2) for x in tensors)
        out = flash_attn_func(*inputs, causal=True, window_size=(size - 1, 0))
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


# --- What is measured
_NONE: Any = ((), ())  # names of kernels are not checked
_FLA: dict[str, Any] = {"package": "flash-linear-attention", "module": "fla.ops.nsa"}
_CUDNN: dict[str, Any] = {"package": "nvidia-cudnn-frontend", "module": "cudnn"}
_CUDNN["backward"] = False
_FA4: dict[str, Any] = {"package": "flash-attn-4", "module": "flash_attn.cute"}
_FLASH: dict[str, Any] = {"package": "Scalable-Flash-Native-Sparse-Attention"}
_FLASH["module"] = "flash_nsa"
_TRITON: dict[str, Any] = {"package": "native-sparse-attention-triton"}
_TRITON["module"] = "native_sparse_attention.ops"
_FSA: dict[str, Any] = {"package": "Flash-Sparse-Attention", "module": "fsa.ops"}
# fla pools blocks of the selection, without overlap.
_POOLED = {"compress_block_size": 64, "compress_stride": 64}


def _topk(name: str, about: dict[str, Any]) -> tuple[Peer, Peer]:
    """Selected branch and whole attention of native-sparse-attention-triton or FSA."""
    attend, whole, select = (
        partial(f, name=name) for f in (topk_selected, topk_whole, topk_select)
    )
    selected = Peer(name, SELECTED, consume=(by_head, attend), kernels=_NONE, **about)
    return selected, Peer(name, WHOLE, whole=whole, select=select, kernels=_NONE, **about)


_OURS: dict[str, Any] = {"package": "nsa", "module": "nsa", "whole": nsa_whole}
_OURS["select"] = nsa_select
_FLEX, _OWN = CONSUMERS[1], CONSUMERS[0].consume
_FLASH_WHOLE: dict[str, Any] = {"whole": flash_whole, "select": flash_select}
PEERS = (
    Peer("nsa", SELECTED, consume=_OWN, package="nsa", module="nsa"),
    Peer("nsa", WHOLE, **_OURS),
    Peer("nsa-pooled-64", WHOLE, variant=_POOLED, **_OURS),
    Peer("nsa", WINDOW, package="nsa", module="nsa"),
    Peer("flex", SELECTED, consume=_FLEX.consume, kernels=_FLEX.kernels),
    Peer("flex", WINDOW, attend=flex_attention, kernels=PROVIDERS["flex"].kernels),
    Peer("fla", SELECTED, consume=(lambda ids, config: ids, fla_selected), kernels=_NONE, **_FLA),
    Peer("fla", WHOLE, variant=_POOLED, whole=fla_whole, select=fla_select, kernels=_NONE, **_FLA),
    *_topk("nsa-triton", _TRITON),
    *_topk("fsa", _FSA),
    Peer("cudnn", SELECTED, consume=(cudnn_made, cudnn_selected), kernels=_NONE, **_CUDNN),
    Peer("fa4", WINDOW, attend=fa4_window, kernels=_NONE, **_FA4),
    Peer("flash-nsa", SELECTED, consume=(flash_made, flash_selected), kernels=_NONE, **_FLASH),
    Peer("flash-nsa", WHOLE, kernels=_NONE, **_FLASH, **_FLASH_WHOLE),
)
