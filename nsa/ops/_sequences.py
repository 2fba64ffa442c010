"""Sequence layouts: packed, dense (viewed as packed) and padded batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import check, fail
from nsa.ops._backend import on_gpu, reads_contents
from nsa.ops._checks import (
    check_cu_seqlens,
    check_heads,
    check_pair,
    check_same_count,
    longest,
)
from nsa.ops._packed import compressed_cu_seqlens, lengths, num_compressed


@dataclass(frozen=True, eq=False)
class Sequences:
    """Layout of the sequences of one call.

    Attributes:
        offsets: int32 ``[B + 1]`` offsets of the query and key tokens; None if all sequences have
            equal length.
        num_sequences: B.
        len_q, len_k: tokens per sequence if ``offsets`` is None, otherwise upper bounds.
        device: device of the tokens.
        shape: leading shape ``[B, T]`` of the caller's tensors for a dense batch; None if packed.
        cu_cmp: int32 ``[B + 1]`` offsets of the compressed blocks, set by :meth:`with_blocks`; None
            before that, and if all sequences have equal length.
        blocks: size and stride of the compressed blocks that ``cu_cmp`` was computed for.
        num_tokens: total number of tokens; None if only the GPU knows it.
    """

    offsets: tuple[Tensor, Tensor] | None
    num_sequences: int
    len_q: int
    len_k: int
    device: torch.device
    shape: tuple[int, int] | None = None
    cu_cmp: Tensor | None = None
    blocks: tuple[int, int] | None = None
    num_tokens: int | None = None

    @classmethod
    def packed(
        cls,
        cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        *,
        num_tokens: int | None = None,
        device: torch.device | None = None,
    ) -> Sequences:
        """Packed sequences; create the object once and pass it to all layers of a model.

        Args:
            cu_seqlens: int32 ``[B + 1]`` offsets.
            max_seqlen: upper bound on the sequence lengths, in tokens. Default: ``num_tokens`` on a
                GPU, elsewhere read from the offsets.
            num_tokens: total number of tokens; required on a GPU without ``max_seqlen``, since the
                offsets are not read there.
            device: device of the tokens; default: that of the offsets.

        Raises:
            ValueError: the offsets are invalid, or ``max_seqlen`` is below the longest sequence.
        """
        device = cu_seqlens.device if device is None else device
        check_cu_seqlens("cu_seqlens", cu_seqlens, device, num_tokens)
        cu_seqlens = cu_seqlens.contiguous()  # kernels assume stride 1
        on_device = on_gpu(cu_seqlens)
        known = not on_device or max_seqlen is not None or num_tokens is not None
        check(known, "max_seqlen", "be given on a GPU, or num_tokens", None)
        most = longest("max_seqlen", cu_seqlens, max_seqlen, num_tokens if on_device else None)
        number = cu_seqlens.shape[0] - 1
        num_tokens = num_tokens if number else 0
        if num_tokens is None and reads_contents(cu_seqlens):
            num_tokens = int(cu_seqlens[-1])
        offsets = cu_seqlens, cu_seqlens
        return cls(offsets, number, most, most, cu_seqlens.device, num_tokens=num_tokens)

    @classmethod
    def padded(cls, attention_mask: Tensor) -> Sequences:
        """Sequences of a padded batch; create the object once and pass it to all layers.

        The tokens of a row form one sequence with positions from 0, with padding on either side.
        The results equal those of the unpadded sequence. Padding is never attended to, but its
        values must be finite; results for padding are undefined. Does not synchronize.

        Args:
            attention_mask: bool or integer ``[B, T]``: true or 1 for a token, false or 0 for
                padding. The tokens of a row must be contiguous; on a GPU this is not checked.

        Raises:
            ValueError: the mask has another shape or dtype, or padding between the tokens of a row.
        """
        mask, argument = attention_mask, "attention_mask"
        is_index = not (mask.dtype.is_floating_point or mask.dtype.is_complex)
        check(is_index, argument, "be bool or integer, true for a token", mask.dtype)
        check(mask.ndim == 2, argument, "have shape [B, T]", tuple(mask.shape))
        batch, length = mask.shape
        valid = mask != 0
        count = valid.sum(-1)
        # Two sequences per row: the left padding, and the tokens with the right padding, which is
        # hidden from them by causality.
        begin = valid.int().cumsum(-1).eq(0).sum(-1) * (count > 0)
        row = torch.arange(batch, device=mask.device) * length
        starts = torch.stack((row, row + begin), dim=-1).flatten()
        cu_seqlens = torch.cat((starts, starts.new_full((1,), batch * length))).int()
        if reads_contents(mask):
            column = torch.arange(length, device=mask.device) - begin[:, None]
            together = (valid == ((column >= 0) & (column < count[:, None]))).all(-1)
            if not together.all():
                got = f"padding between tokens in row {int(together.int().argmin())}"
                fail(argument, "have the tokens of each row together", got)
        return cls(
            (cu_seqlens, cu_seqlens), 2 * batch, length, length, mask.device, (batch, length)
        )

    @property
    def max_q(self) -> int:
        """Upper bound on the query length, at least 1 so that no padded tensor is empty."""
        return max(self.len_q, 1)

    @property
    def max_k(self) -> int:
        """Upper bound on the key length, at least 1."""
        return max(self.len_k, 1)

    @property
    def cu_q(self) -> Tensor:
        """Offsets of the queries."""
        return self._equal(self.len_q) if self.offsets is None else self.offsets[0]

    @property
    def cu_k(self) -> Tensor:
        """Offsets of the key tokens."""
        return self._equal(self.len_k) if self.offsets is None else self.offsets[1]

    def _equal(self, each: int) -> Tensor:
        return torch.arange(self.num_sequences + 1, dtype=torch.int32, device=self.device) * each

    def arguments(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """Arguments of operators and kernels: ``cu_q, cu_k, len_q, len_k, num_sequences``."""
        cu_q, cu_k = (None, None) if self.offsets is None else self.offsets
        return cu_q, cu_k, self.len_q, self.len_k, self.num_sequences

    def num_tiles(self, rows: int, tile: int, each: int) -> int:
        """Number of tiles of ``tile`` rows for ``rows`` packed rows, ``each`` per sequence.

        An upper bound if there are offsets.
        """
        if self.offsets is None:
            return self.num_sequences * -(-each // tile)
        return rows // tile + self.num_sequences

    def blocks_of(self, config: NSAConfig) -> tuple[Tensor | None, int]:
        """Offsets of the compressed blocks, and an upper bound on the blocks per sequence.

        The offsets are None if all sequences have equal length.
        """
        most = max((self.len_k - config.compress_block_size) // config.compress_stride + 1, 0)
        return self.with_blocks(config).cu_cmp, most

    def with_blocks(self, config: NSAConfig) -> Sequences:
        """Return a copy with the offsets of the compressed blocks.

        All operators and layers use the same offsets.
        """
        blocks = block_sizes(config)
        if self.offsets is None or self.blocks == blocks:
            return self
        return replace(self, cu_cmp=compressed_cu_seqlens(self.offsets[1], config), blocks=blocks)

    def to(self, device: torch.device | int | str) -> Sequences:
        """Return a copy for tokens on another device; accelerate calls this as well."""
        device = torch.device(device)
        offsets, cu_cmp = self.offsets, self.cu_cmp
        if offsets is not None:
            offsets = offsets[0].to(device), offsets[1].to(device)
        if cu_cmp is not None:
            cu_cmp = cu_cmp.to(device)
        return replace(self, offsets=offsets, cu_cmp=cu_cmp, device=device)

    def restore(self, x: Tensor) -> Tensor:
        """Convert packed rows to the caller's layout."""
        return x if self.shape is None else x.unflatten(0, self.shape)


def block_sizes(config: NSAConfig) -> tuple[int, int]:
    """Size and stride of the compressed blocks, which determine their offsets."""
    return config.compress_block_size, config.compress_stride


def pack(x: Tensor) -> Tensor:
    """View a dense batch ``[B, T, H, D]`` as packed ``[B * T, H, D]``; packed input is returned."""
    return x.flatten(0, 1) if x.ndim == 4 else x


def open_sequences(
    q: Tensor,
    key_shape: tuple[int, ...],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    backend: str,
    sequences: Sequences | None = None,
) -> Sequences:
    """Check the caller's sequence arguments and return the layout.

    Args:
        q: queries as passed by the caller, packed or dense.
        key_shape: leading shape of the keys: ``(S,)`` packed, ``(B, S)`` dense.
        cu_seqlens_q: offsets of the queries as passed by the caller.
        cu_seqlens_k: offsets of the keys.
        max_seqlen_q: length hint for the queries.
        max_seqlen_k: length hint for the keys.
        backend: the chosen backend. Kernels need no exact lengths: without a hint, the number of
            tokens is the upper bound.
        sequences: replaces offsets and hints.
    """
    given: dict[str, Tensor | int | None]
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if sequences is not None:
        given |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        check_given("q", q.shape[:-2], q.device, sequences, **given)
        if key_shape != tuple(q.shape[:-2]):
            rule = f"have the tokens of q {tuple(q.shape[:-2])} with sequences"
            fail("k", rule, key_shape)
        return replace(sequences, shape=(q.shape[0], q.shape[1]) if q.ndim == 4 else None)
    if q.ndim == 4:
        check_absent("a dense batch [B, T, H, D]", **given)
        batch, num_queries = q.shape[:2]
        if len(key_shape) != 2 or key_shape[0] != batch or key_shape[1] < num_queries:
            rule = f"be dense with batch {batch} and at least {num_queries} tokens each"
            fail("k", rule, f"leading shape {key_shape}")
        return Sequences(None, batch, num_queries, key_shape[1], q.device, (batch, num_queries))
    if len(key_shape) != 1:
        fail("k", "be packed [S, Hkv, D] when q is packed", f"leading shape {key_shape}")
    if cu_seqlens_q is None:
        rule = "be given together with cu_seqlens_k"
        check(cu_seqlens_k is None, "cu_seqlens_q", rule, None)
        if key_shape[0] < q.shape[0]:
            fail("k", f"have at least as many tokens as q ({q.shape[0]})", key_shape[0])
        return Sequences(None, 1, q.shape[0], key_shape[0], q.device)
    is_same = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
        max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device, q.shape[0])
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device, key_shape[0])
    check_same_count(cu_seqlens_q, cu_seqlens_k)
    cu_seqlens_q = cu_seqlens_q.contiguous()  # kernels assume stride 1
    cu_seqlens_k = cu_seqlens_q if is_same else cu_seqlens_k.contiguous()
    if reads_contents(cu_seqlens_q):
        check_pair(cu_seqlens_q, cu_seqlens_k)
    upper = (q.shape[0], key_shape[0]) if backend == "triton" else (None, None)
    len_q = longest("max_seqlen_q", cu_seqlens_q, max_seqlen_q, upper[0])
    len_k = longest("max_seqlen_k", cu_seqlens_k, max_seqlen_k, upper[1])
    offsets = cu_seqlens_q, cu_seqlens_k
    return Sequences(offsets, cu_seqlens_q.shape[0] - 1, len_q, len_k, q.device)


def compressed_key_shape(
    q: Tensor, k_cmp: Tensor, config: NSAConfig, cu_seqlens_k: Tensor | None
) -> tuple[int, ...]:
    """Check compressed keys and return the leading shape of the key tokens they were made from.

    Without ``cu_seqlens_k`` there are as many key tokens as queries. With it, their number is read
    on the CPU; on a GPU it is assumed that they fill the rows of ``k_cmp``.
    """
    check_heads("q", q, config.num_heads, config.head_dim, q)
    check(k_cmp.ndim == 3, "k_cmp", "be packed [C, Hkv, D]", tuple(k_cmp.shape))
    check_heads("k_cmp", k_cmp, config.num_kv_heads, config.head_dim, q)
    stride = config.compress_stride
    if cu_seqlens_k is None:
        key_shape = tuple(q.shape[:-2])
        exact = math.prod(key_shape[:-1]) * max(
            (key_shape[-1] - config.compress_block_size) // stride + 1, 0
        )
        hint = "Give cu_seqlens_q and cu_seqlens_k when there are more key tokens than queries."
    elif reads_contents(cu_seqlens_k) and cu_seqlens_k.ndim == 1 and cu_seqlens_k.numel() > 0:
        key_shape = (int(cu_seqlens_k[-1]),)
        exact = int(num_compressed(lengths(cu_seqlens_k), config).sum())
        hint = ""
    else:
        return (k_cmp.shape[0] * stride,)
    upper = math.prod(key_shape) // stride
    if k_cmp.shape[0] != exact and k_cmp.shape[0] != upper:
        rule = (
            f"have one row per compressed block ({exact}), or S // compress_stride ({upper}) rows"
        )
        fail("k_cmp", rule, k_cmp.shape[0], hint)
    return key_shape


def open_layer_input(
    x: Tensor,
    width: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    attention_mask: Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[Tensor, Sequences]:
    """Return a layer's input as packed tokens ``[T, width]``, and the sequence layout.

    Args:
        x: packed ``[T, width]`` or a dense batch ``[B, T, width]``.
        width: size of the residual stream.
        cu_seqlens: offsets of packed sequences; None means one sequence.
        max_seqlen: length hint for packed sequences.
        attention_mask: mask of a padded batch.
        sequences: replaces the three preceding arguments.
    """
    check(isinstance(x, Tensor), "x", "be a tensor", type(x).__name__)
    for name, value, kind, rule in (
        ("cu_seqlens", cu_seqlens, Tensor, "a tensor"),
        ("attention_mask", attention_mask, Tensor, "a tensor"),
        ("sequences", sequences, Sequences, "nsa.Sequences"),
    ):
        fits = value is None or isinstance(value, kind)
        check(fits, name, f"be {rule} or None", type(value).__name__)
    if x.ndim not in (2, 3) or x.shape[-1] != width:
        fail("x", f"have shape [T, {width}] or [B, T, {width}]", tuple(x.shape))
    packed = x if x.ndim == 2 else x.flatten(0, 1)
    if attention_mask is not None:
        if sequences is not None:
            fail("attention_mask", "be left out with sequences", "a tensor")
        if x.shape[:-1] != attention_mask.shape:
            rule = f"have the leading shape of x {tuple(x.shape[:-1])}"
            fail("attention_mask", rule, tuple(attention_mask.shape))
        if attention_mask.device != x.device:
            fail("attention_mask", f"be on {x.device} like x", attention_mask.device)
        sequences = Sequences.padded(attention_mask)
    if sequences is not None:
        given = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        check_given("x", x.shape[:-1], x.device, sequences, **given)
        return packed, sequences
    if x.ndim == 2 and cu_seqlens is not None:
        return x, Sequences.packed(cu_seqlens, max_seqlen, num_tokens=x.shape[0], device=x.device)
    check_absent("a dense batch [B, T, width]", cu_seqlens=cu_seqlens)
    batch, length = (1, x.shape[0]) if x.ndim == 2 else x.shape[:2]
    return packed, Sequences(None, batch, length, length, x.device)


def check_absent(other: str, **given: Tensor | int | None) -> None:
    """Check that the caller left out arguments that cannot be combined with ``other``."""
    for name, x in given.items():
        if x is not None:
            got = "a tensor" if isinstance(x, Tensor) else x
            fail(name, f"be left out with {other}", got)


def check_given(
    argument: str,
    shape: tuple[int, ...],
    device: torch.device,
    sequences: Sequences,
    **others: Tensor | int | None,
) -> None:
    """Check that the caller's ``sequences`` match the tokens and are the only description."""
    check_absent("sequences or attention_mask", **others)
    if device != sequences.device:
        fail("sequences", f"be on {device} like {argument}", sequences.device)
    count, batch = math.prod(shape), sequences.shape
    if batch is not None:
        if tuple(shape) not in (batch, (math.prod(batch),)):
            rule = f"be of a batch of shape {tuple(shape)} like {argument}"
            fail("sequences", rule, batch)
        return
    described: int | None
    if sequences.offsets is None:
        described = sequences.num_sequences * sequences.len_q
    else:
        described = None if torch.compiler.is_compiling() else sequences.num_tokens
    if described is not None and described != count:
        is_equal = sequences.offsets is None
        got = f"{sequences.num_sequences} of {sequences.len_q}" if is_equal else described
        fail("sequences", f"contain as many tokens as {argument} ({count})", got)
