"""Checks of user input.

The contents of index tensors are read only on the CPU: reading them on a GPU would synchronize.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._backend import reads_contents
from nsa.ops._packed import lengths


def _largest(counts: Tensor) -> int:
    """Maximum of the counts, 0 if there are none; synchronizes on a GPU."""
    return int(counts.max()) if counts.numel() else 0


def longest(argument: str, cu_seqlens: Tensor, hint: int | None, upper: int | None) -> int:
    """Upper bound of the sequence lengths: the hint, ``upper``, or read from ``cu_seqlens``.

    Reading ``cu_seqlens`` on a GPU synchronizes.
    """
    if hint is None:
        return _largest(lengths(cu_seqlens)) if upper is None else upper
    fits = torch.compiler.is_compiling() or 0 <= hint <= 2**30
    check(fits, argument, "be at least 0 and at most 2**30", hint)
    if reads_contents(cu_seqlens) and hint < (actual := _largest(lengths(cu_seqlens))):
        fail(argument, f"be at least the longest sequence ({actual})", hint)
    return hint


def check_cu_seqlens(
    argument: str,
    cu_seqlens: Tensor,
    device: torch.device,
    num_tokens: int | None,
) -> None:
    """Check ``cu_seqlens``, which describes ``num_tokens`` tokens if known; on a GPU its metadata.

    Raises:
        ValueError: dtype, shape or device are wrong, or, on a CPU, the contents.
    """
    check(cu_seqlens.dtype == torch.int32, argument, "be int32", cu_seqlens.dtype)
    shape = tuple(cu_seqlens.shape)
    least = 1 if num_tokens else 0  # kernels search for the sequence of each token
    fits = len(shape) == 1 and shape[0] > least
    check(fits, argument, f"have shape [B + 1] with B at least {least}", shape)
    if cu_seqlens.device != device:
        fail(argument, f"be on {device} like the tokens", cu_seqlens.device)
    if reads_contents(cu_seqlens):
        check_cu_seqlens_contents(argument, cu_seqlens, num_tokens)


def check_cu_seqlens_contents(argument: str, cu_seqlens: Tensor, num_tokens: int | None) -> None:
    """Check that offsets start at 0, never decrease, and end at the number of tokens if known."""
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    check(first == 0, argument, "start at 0", first)
    shortest = -_largest(-lengths(cu_seqlens))
    check(shortest >= 0, argument, "not decrease", f"a sequence of {shortest} tokens")
    if num_tokens is not None and last != num_tokens:
        fail(argument, f"end at the number of tokens ({num_tokens})", last)


def check_same_count(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Check that queries and keys have the same number of sequences."""
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        rule = f"have {cu_seqlens_q.numel()} entries as cu_seqlens_q"
        fail("cu_seqlens_k", rule, cu_seqlens_k.numel())


def check_pair(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Check that no sequence has more query tokens than key tokens."""
    missing = _largest(lengths(cu_seqlens_q) - lengths(cu_seqlens_k))
    rule = "give every sequence at least as many keys as queries"
    check(missing <= 0, "cu_seqlens_k", rule, f"{missing} too few")


def check_heads(argument: str, x: Tensor, num_heads: int, size: int, like: Tensor) -> None:
    """Check that ``x`` is ``[..., num_heads, size]`` with the dtype and device of ``like``."""
    shape = tuple(x.shape)
    if x.ndim not in (3, 4) or shape[-2:] != (num_heads, size):
        heads = f"{num_heads}, {size}]"
        fail(argument, f"have shape [tokens, {heads} or [B, T, {heads}", shape)
    if not x.dtype.is_floating_point:
        fail(argument, "be a float tensor", x.dtype)
    if x.dtype != like.dtype:
        rule = f"have the dtype of the other inputs ({like.dtype})"
        fail(argument, rule, x.dtype)
    if x.device != like.device:
        fail(argument, f"be on {like.device} like the other inputs", x.device)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> None:
    """Check that queries, keys and values of one branch match the config and each other."""
    check_heads("q", q, config.num_heads, config.head_dim, q)
    check_heads("k", k, config.num_kv_heads, config.head_dim, q)
    check_heads("v", v, config.num_kv_heads, config.value_dim, q)
    if v.shape[:-2] != k.shape[:-2]:
        fail("v", f"have the tokens of k {tuple(k.shape[:-2])}", tuple(v.shape[:-2]))


def check_block_indices(block_indices: Tensor, config: NSAConfig) -> None:
    """Check the metadata of block indices passed by the caller."""
    dtype = block_indices.dtype
    check(dtype in (torch.int32, torch.int64), "block_indices", "be int32 or int64", dtype)
    shape = tuple(block_indices.shape)
    if len(shape) not in (3, 4) or shape[-2] != config.num_kv_heads:
        slots = f"{config.num_kv_heads}, n]"
        fail("block_indices", f"have shape [T, {slots} or [B, T, {slots}", shape)


def scale_of(config: NSAConfig, softmax_scale: float | None) -> float:
    """Softmax scale; ``D ** -0.5`` by default."""
    scale = config.head_dim**-0.5 if softmax_scale is None else softmax_scale
    check(0 < scale < math.inf, "softmax_scale", "be positive and finite", scale)
    return float(scale)


# Index limits of one kernel launch. Addresses are 64-bit; rows, blocks, entries and tile indices
# are 32-bit. The limits exceed the memory of current GPUs; beyond them kernels would read and
# write the wrong rows. They are checked when an operator runs, not when it is traced.
#
# int32 range, minus a margin for the last tile, which reaches past the end.
NUMBERS = 2**31 - 2**16
# Key tokens. A window has at most 2**30 tokens, so its end stays below 2**31.
TOKENS = 2**30 - 2**16
# Slots that the entries of a tile are sorted into: blocks times entries.
SORTED = 2**31 - 1
# Blocks in the list of a tile: two counts are packed into one integer.
LISTED = 2**16


def check_numbers(
    argument: str, number: int, what: str, limit: int | None = None, hint: str = ""
) -> None:
    """Raise unless ``number``, of ``what``, is below ``limit`` (``NUMBERS`` if it is None)."""
    limit = NUMBERS if limit is None else limit
    if number >= limit:
        rule = f"have fewer than {limit} {what}"
        fail(argument, rule, number, hint or "Give fewer tokens a call.")


def check_queries(q: Tensor) -> None:
    """Check that the row indices of ``q [T, Hq, D]`` fit in 32 bits."""
    check_numbers("q", q.shape[0] * q.shape[1], "rows (tokens times query heads)")


def check_keys(argument: str, k: Tensor, stride: int = 1) -> None:
    """Check that the token indices of ``k [N, Hkv, D]``, ``stride`` per row, fit in 32 bits."""
    check_numbers(argument, k.shape[0] * stride, "tokens of keys", TOKENS)
