"""Selection-block scores and top n selection (Eqs. 8 to 12): the specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops._checks import check_block_indices
from nsa.ops._chunks import Part, is_long, parts
from nsa.ops._masked_attention import (
    accumulate_dtype,
    grouped_scores,
    max_blocks,
    max_compressed,
    padded_positions,
    visible_compressed,
    visible_tokens,
)
from nsa.ops._operator import Call
from nsa.ops._packed import (
    LEAST_SIZE,
    compressed_cu_seqlens,
    lengths,
    locate,
    num_compressed,
    pad,
    query_positions,
    unpad,
)
from nsa.ops._sequences import Sequences, open_sequences

# Limit on the exponents of token_max, so that 64 heads have a finite sum in fp32.
MAX_EXPONENT = 80.0
_RANDOM_SCORES = 1 << 24  # in memory at once
_KEYS = 2048  # whose products with a chunk of queries fit the cache of a CPU


class SelectionInputs(NamedTuple):
    """Inputs of the block scores.

    Attributes:
        q: queries of the compressed branch ``[T, Hq, D]``; with other scores, of the selected one
            or of the index.
        k: compressed keys ``[C, Hkv, D]``; with other scores, keys of the selected branch
            or of the index ``[S, Hkv, D]``.
        lse: the compressed branch's ``[T, Hq]``; None with other scores.
    """

    q: Tensor
    k: Tensor
    lse: Tensor | None


def new_selection(q: Tensor, config: NSAConfig) -> Tensor:
    """Allocate the selected blocks, int32 ``[T, Hkv, n]``."""
    shape = (q.shape[0], config.num_kv_heads, config.num_selected_blocks)
    return q.new_empty(shape, dtype=torch.int32)


def overlap_stencil(config: NSAConfig) -> dict[int, int]:
    """Nonzero weights of Eq. 9, ``overlap(i, j) / d``, by the offset ``i - j * l' / d``."""
    length = config.compress_block_size // config.compress_stride
    block = config.block_size // config.compress_stride
    return {
        offset: min(offset + length, block) - max(offset, 0) for offset in range(1 - length, block)
    }


def forced_blocks(block: Tensor, current: Tensor, config: NSAConfig) -> Tensor:
    """Whether blocks are always selected, given the queries' own blocks; bool, broadcast."""
    return (block < config.num_init_blocks) | (block > current - config.num_local_blocks)


def token_max_scores(inputs: SelectionInputs, call: Call) -> Tensor:
    """Importance of every block: the sum over the group's heads of ``exp(m - L)``.

    m is the largest scaled product of the query with a visible token of the block, and L the
    log-sum-exp of the products with the visible tokens of the forced blocks, always exact. The
    difference is at most ``MAX_EXPONENT``.

    Returns:
        ``[T, Hkv, M]`` in the accumulation dtype.
    """
    (q, k, _), config, sequences = inputs, call.config, call.sequences
    visible = visible_tokens(sequences)[:, None, None]  # [B, 1, 1, T, S]

    def products(q: Tensor, k: Tensor) -> Tensor:
        rows = pad(q, sequences.cu_q, sequences.max_q), pad(k, sequences.cu_k, sequences.max_k)
        scores = grouped_scores(*rows, call.softmax_scale).unflatten(2, (-1, sequences.max_q))
        return scores.masked_fill(~visible, -torch.inf)

    exact = products(q, k)  # [B, Hkv, G, T, S]
    block = torch.arange(sequences.max_k, device=q.device) // config.block_size
    current = padded_positions(sequences)[..., None] // config.block_size
    forced = forced_blocks(block, current, config)
    lse = exact.masked_fill(~forced[:, None, None], -torch.inf).logsumexp(-1)
    if config.score_precision == "fp8":
        low, scale = blocks_to_fp8(k, config, sequences)
        rounded = (low.to(accumulate_dtype(k)) * scale[..., None]).to(accumulate_dtype(k))
        exact = products(rounded_for_scores(q, config), rounded)
    num_blocks = max_blocks(sequences, config)
    missing = num_blocks * config.block_size - sequences.max_k
    padded = torch.nn.functional.pad(exact, (0, missing), value=-torch.inf)
    largest = padded.unflatten(-1, (num_blocks, config.block_size)).amax(-1)
    scores = torch.exp((largest - lse[..., None]).clamp(max=MAX_EXPONENT)).sum(2)
    return unpad(scores.transpose(1, 2), sequences.cu_q, q.shape[0])


def token_max_parts(inputs: SelectionInputs, call: Call) -> Iterator[tuple[Part, Tensor]]:
    """Chunks of queries with their :func:`token_max_scores`, in linear memory.

    Scores of forced and of invisible blocks are those of all their tokens before the chunk's end.
    """
    q, k, _ = inputs
    low_q, low_k = q, k
    if call.config.score_precision == "fp8":
        rows, scale = blocks_to_fp8(k, call.config, call.sequences)
        low_k = rows.to(accumulate_dtype(k)) * scale[..., None]
        low_q = rounded_for_scores(q, call.config)
    q, k, low_q, low_k = (x.to(accumulate_dtype(q)) for x in (q, k, low_q, low_k))
    group_size = q.shape[1] // k.shape[1]
    for part in parts(call):
        found = []
        for head in range(k.shape[1]):
            own = slice(head * group_size, (head + 1) * group_size)
            exact, rows = (  # [G * T, D]
                x[part.queries, own].transpose(0, 1).flatten(0, 1) * call.softmax_scale
                for x in (q, low_q)
            )
            lse = _forced_lse(exact, k[part.keys, head], part.call)
            largest = _largest(rows, low_k[part.keys, head], call.config.block_size)
            scores = (largest - lse).clamp_(max=MAX_EXPONENT).exp_()
            found.append(scores.unflatten(1, (group_size, -1)).sum(1).T)
        yield part, torch.stack(found, 1)


def _largest(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """Largest product of each query ``[N, D]`` with a key ``[S, D]`` of each block, ``[M, N]``."""
    columns, whole = q.T.contiguous(), k.shape[0] // block_size * block_size
    found = q.new_empty(-(-k.shape[0] // block_size), q.shape[0])
    step = max(_KEYS // block_size, 1)  # blocks
    # Reused memory: the system clears new memory, which takes longer than the maximum.
    products = q.new_empty(step * block_size, q.shape[0])
    for keys, of_blocks in zip(
        k[:whole].split(step * block_size), found[: whole // block_size].split(step), strict=True
    ):
        own = products[: keys.shape[0]]
        torch.mm(keys, columns, out=own)
        torch.amax(own.unflatten(0, (-1, block_size)), 1, out=of_blocks)
    if whole < k.shape[0]:
        torch.amax(k[whole:] @ columns, 0, out=found[-1])
    return found


def _forced_lse(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Log-sum-exp of the visible tokens of the forced blocks, for rows ``[G * T, D]``."""
    config, size, length = call.config, call.config.block_size, k.shape[0]
    position = torch.arange(length - call.sequences.len_q, length, device=q.device)[:, None]
    begin = config.num_init_blocks * size
    oldest = position // size + 1 - config.num_local_blocks  # of the forced recent blocks
    near = max(int(oldest[0]) * size, begin)
    token = torch.arange(length, device=q.device)
    token, keys = (torch.cat((x[:begin], x[near:])) for x in (token, k))
    forced = (token < begin) | (token // size >= oldest)
    scores = (q @ keys.T).unflatten(0, (-1, position.shape[0]))
    scores.masked_fill_(~(forced & (token <= position)), -torch.inf)
    return scores.logsumexp(-1).flatten()


def random_scores(positions: Tensor, num_heads: int, num_blocks: int) -> Tensor:
    """Scores ``random`` of queries at ``positions``: uniform hashes, fp32 ``[T, Hkv, M]``.

    They depend on position, KV head and block alone; the mixing is MurmurHash3's 64-bit finalizer
    (Appleby, 2011).
    """
    head = torch.arange(num_heads, device=positions.device)[:, None]
    block = torch.arange(num_blocks, device=positions.device)
    mixed = (positions[:, None, None] * num_heads + head << 24) + block
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        mixed = (mixed ^ mixed >> 33 & 0x7FFFFFFF) * factor
    return (mixed >> 40 & 0xFFFFFF).float() / 2**24


def block_scores(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    config: NSAConfig,
    sequences: Sequences,
    softmax_scale: float,
) -> Tensor:
    """Importance of every selection block for every query, summed over the group (Eqs. 8, 9, 10).

    The summation order is fixed, heads before stencil taps, so that equal terms result in equal
    scores.

    Returns:
        ``[T, Hkv, M]`` in the dtype of ``lse``.
    """
    q, k_cmp = (rounded_for_scores(x, config) for x in (q, k_cmp))
    keys = pad(
        k_cmp, compressed_cu_seqlens(sequences.cu_k, config), max_compressed(sequences, config)
    )
    probabilities = _exp_scores(q, keys, lse, sequences, softmax_scale)  # [B, Hkv, G, T, C]
    visible = visible_compressed(sequences, config)[:, None, None]
    probabilities = torch.where(visible, probabilities, 0.0).sum(2)  # [B, Hkv, T, C]
    importance = spread(probabilities, max_blocks(sequences, config), config)
    return unpad(importance.transpose(1, 2), sequences.cu_q, q.shape[0])


def _exp_scores(
    q: Tensor, keys: Tensor, lse: Tensor, sequences: Sequences, softmax_scale: float
) -> Tensor:
    """``exp(q . k * scale - lse)`` for padded keys, ``[B, Hkv, G, T, C]``."""
    scores = grouped_scores(pad(q, sequences.cu_q, sequences.max_q), keys, softmax_scale)
    lse_rows = pad(lse, sequences.cu_q, sequences.max_q).transpose(1, 2)  # [B, Hq, T]
    found = torch.exp(scores - lse_rows.reshape(*scores.shape[:3], 1))
    return found.unflatten(2, (-1, sequences.max_q))


def spread(probabilities: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """Eq. 9: importance of blocks ``[..., M]`` from probabilities of compressed keys."""
    step, last = config.block_size // config.compress_stride, probabilities.shape[-1] - 1
    first = torch.arange(num_blocks, device=probabilities.device) * step
    importance = torch.zeros((), dtype=probabilities.dtype, device=probabilities.device)
    for offset, weight in overlap_stencil(config).items():
        i = first + offset
        taps = probabilities[..., i.clamp(0, last)]
        importance = importance + weight * torch.where((i >= 0) & (i <= last), taps, 0.0)
    return importance


def rounded_for_scores(x: Tensor, config: NSAConfig) -> Tensor:
    """Round queries or compressed keys ``[N, H, D]`` to ``score_precision``."""
    if config.score_precision == "exact":
        return x
    low, row_scale = to_fp8(x)
    return (low.to(accumulate_dtype(x)) * row_scale[..., None]).to(accumulate_dtype(x))


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[..., D]`` in e4m3 and their fp32 scales ``[...]``; the row maximum maps to 448."""
    return quantize(x, x.abs().amax(-1).float())


def blocks_to_fp8(k: Tensor, config: NSAConfig, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Keys ``[S, Hkv, D]`` in e4m3 and fp32 scales ``[S, Hkv]``, equal within a selection block."""
    sequence, row, _ = locate(k.shape[0], sequences.cu_k)
    # Blocks are numbered as if each sequence had its incomplete block to itself.
    block = (
        sequences.cu_k.long()[sequence] // config.block_size + sequence + row // config.block_size
    )
    largest = k.abs().amax(-1).float()
    of_blocks = largest.new_zeros(
        k.shape[0] // config.block_size + sequences.num_sequences + 1, k.shape[1]
    )
    index = block[:, None].expand_as(largest)
    scale = of_blocks.scatter_reduce(0, index, largest, "amax").gather(0, index)
    return quantize(k, scale)


def quantize(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in e4m3 and their scales, with which the given magnitudes ``[...]`` map to 448."""
    scale = largest / torch.finfo(torch.float8_e4m3fn).max
    scale = torch.where(scale > 0, scale, 1.0)
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def coarse_keys(k_cmp: Tensor, config: NSAConfig, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Means of the compressed keys that start in each complete coarse block, and their offsets."""
    assert config.coarse_block_size is not None
    each = config.coarse_block_size // config.compress_stride
    cu_cmp = compressed_cu_seqlens(sequences.cu_k, config)
    ends = (lengths(cu_cmp) // each).cumsum(0)
    cu_coarse = torch.cat((ends.new_zeros(1), ends)).int()
    sequence, block, _ = locate(max(k_cmp.shape[0] // each, LEAST_SIZE), cu_coarse)
    row = (cu_cmp.long()[sequence] + block * each)[:, None] + torch.arange(
        each, device=k_cmp.device
    )
    with_zero_row = torch.cat((k_cmp, k_cmp.new_zeros(1, *k_cmp.shape[1:])))
    members = with_zero_row[row.clamp(max=k_cmp.shape[0])]
    return members.to(accumulate_dtype(k_cmp)).mean(1).to(k_cmp.dtype), cu_coarse


def coarse_candidates(
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    config: NSAConfig,
    sequences: Sequences,
    softmax_scale: float,
) -> Tensor:
    """First of two stages: coarse blocks that remain candidates, bool ``[T, Hkv, M_coarse]``.

    The score of a coarse block is ``sum over the group of exp(q . mean * scale - lse)`` with the
    mean of the compressed keys that start in it. The ``forced_coarse_blocks`` always remain; a
    query ranks only coarse blocks whose compressed keys are all visible. This stage is cheap and
    does not round its inputs, whatever ``score_precision`` is.
    """
    assert config.coarse_block_size is not None
    num_coarse = max(-(-sequences.max_k // config.coarse_block_size), LEAST_SIZE)
    means, cu_coarse = coarse_keys(k_cmp, config, sequences)
    scores = _exp_scores(q, pad(means, cu_coarse, num_coarse), lse, sequences, softmax_scale)
    scores = unpad(scores.sum(2).transpose(1, 2), sequences.cu_q, q.shape[0])
    positions = query_positions(q.shape[0], sequences.cu_q, sequences.cu_k)
    return kept_coarse(ranked_coarse(scores, positions, config), config)


def ranked_coarse(scores: Tensor, positions: Tensor, config: NSAConfig) -> Tensor:
    """Scores of coarse blocks ``[T, Hkv, M_coarse]``; inf for forced, -inf for future blocks."""
    assert config.coarse_block_size is not None
    positions = positions[:, None, None]
    block = torch.arange(scores.shape[-1], device=scores.device)
    init, local = config.forced_coarse_blocks
    current = positions // config.coarse_block_size
    seen = (
        num_compressed(positions + 1, config) * config.compress_stride // config.coarse_block_size
    )
    ranked = torch.where(block < seen, scores, 0.0)
    return ranked.masked_fill((block < init) | (block > current - local), torch.inf).masked_fill(
        block > current, -torch.inf
    )


def kept_coarse(ranked: Tensor, config: NSAConfig) -> Tensor:
    """Mask of the coarse blocks that remain, from :func:`ranked_coarse`, same shape."""
    rank = ranked.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return (rank < config.num_coarse_blocks) & (ranked > -torch.inf)


def choose_blocks(
    scores: Tensor, positions: Tensor, config: NSAConfig, coarse: Tensor | None = None
) -> Tensor:
    """The n blocks of every query (Eqs. 11, 12): forced ones, then by score, ties to the lower id.

    Args:
        scores: ``[T, Hkv, M]``.
        positions: position of each query in its sequence, int64 ``[T]``.
        config: the sparse pattern.
        coarse: result of :func:`coarse_candidates`; None makes every block up to the query's own a
            candidate.

    Returns:
        int32 ``[T, Hkv, n]``, ascending, padded with -1 at the end.
    """
    # At least n columns, of which those after the query's own block are no candidates.
    scores = torch.nn.functional.pad(scores, (0, config.num_selected_blocks))
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    current = (positions // config.block_size)[:, None, None]
    candidate = (block <= current).expand(scores.shape)
    forced = forced_blocks(block, current, config)
    if coarse is not None:
        assert config.coarse_block_size is not None
        parent = block * config.block_size // config.coarse_block_size
        inside = coarse[..., parent.clamp(max=coarse.shape[-1] - 1)]
        candidate = candidate & (inside | forced)
    scores = torch.where(scores.isnan(), torch.inf, scores)  # the output becomes NaN
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)
    counts = torch.full_like(positions, config.num_selected_blocks)
    for length, n in reversed(config.block_counts):
        counts = torch.where(positions < length, n, counts)
    counts = counts[:, None, None].expand(*ranked.shape[:2], 1)
    least = ranked.topk(config.num_selected_blocks).values.gather(-1, counts - 1)
    above, equal = ranked > least, ranked == least
    first = equal.cumsum(-1, dtype=torch.int32) <= counts - above.sum(-1, keepdim=True)
    best = torch.where((above | equal & first) & candidate, block, num_blocks)
    best = best.topk(config.num_selected_blocks, largest=False).values
    return torch.where(best < num_blocks, best, -1).int()


def select_blocks_reference(inputs: SelectionInputs, call: Call) -> Tensor:
    """See :func:`nsa.select_blocks`; inputs are packed and validated."""
    (q, k, lse), config, sequences, coarse = inputs, call.config, call.sequences, None
    by_token = config.scoring.scores == "token_max"
    if is_long(call, q, with_few=by_token):
        return torch.cat(list(_selected_by_chunk(inputs, call)))
    positions = query_positions(q.shape[0], sequences.cu_q, sequences.cu_k)
    if config.scores == "random":
        sizes = config.num_kv_heads, max_blocks(sequences, config)
        each = positions.split(max(1, _RANDOM_SCORES // (sizes[0] * sizes[1])))
        return torch.cat([choose_blocks(random_scores(x, *sizes), x, config) for x in each])
    if by_token:
        scores = token_max_scores(inputs, call)
    else:
        assert lse is not None
        rest = (q, k, lse, config, sequences, call.softmax_scale)
        scores = block_scores(*rest)
        coarse = None if config.coarse_block_size is None else coarse_candidates(*rest)
    found = choose_blocks(scores, positions, config, coarse)
    return found.expand(-1, config.num_kv_heads, -1).contiguous()  # one head if the index is shared


def _selected_by_chunk(inputs: SelectionInputs, call: Call) -> Iterator[Tensor]:
    (q, k, lse), config = inputs, call.config
    if config.scoring.scores == "token_max":
        for part, scores in token_max_parts(inputs, call):
            length = part.call.sequences.len_k
            positions = torch.arange(length - scores.shape[0], length, device=q.device)
            found = choose_blocks(scores, positions, config)
            yield found.expand(-1, config.num_kv_heads, -1)
        return
    for part in parts(call):
        rows = k if config.scores == "random" else k[part.blocks]
        given = q[part.queries], rows, None if lse is None else lse[part.queries]
        yield select_blocks_reference(SelectionInputs(*given), part.call)


def blocks_to_ranges(
    block_indices: Tensor,
    config: NSAConfig,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Convert selected blocks to merged token ranges.

    Args:
        block_indices: integer ``[T, Hkv, n]`` or ``[B, T, Hkv, n]``, any order. Duplicates count
            once; ids below 0 or above ``t // l'`` are ignored.
        config: the sparse pattern.
        cu_seqlens_q: int32 ``[B + 1]`` offsets of the queries; None means one sequence.
        cu_seqlens_k: int32 ``[B + 1]`` offsets of the key tokens; None means those of the queries.

    Returns:
        int32 ``[T, Hkv, n, 2]`` (with a leading B for a dense batch): ``[start, end)`` in tokens of
        the sequence, adjacent blocks merged, clamped to t + 1, ascending; unused ranges are -1.

    Raises:
        ValueError: shapes or offsets do not match.
    """
    check_block_indices(block_indices, config)
    ids = block_indices
    key_shape = tuple(ids.shape[:-2]) if cu_seqlens_k is None else (int(cu_seqlens_k[-1]),)
    sequences = open_sequences(
        ids, key_shape, cu_seqlens_q, cu_seqlens_k, ids.shape[0], key_shape[0], "reference"
    )
    ids = (ids.flatten(0, 1) if ids.ndim == 4 else ids).long()
    positions = query_positions(ids.shape[0], sequences.cu_q, sequences.cu_k)[:, None, None]
    absent = torch.iinfo(torch.int64).max // config.block_size
    present = (ids >= 0) & (ids <= positions // config.block_size)
    ids = torch.where(present, ids, absent).sort(-1).values
    ids[..., 1:] = torch.where(ids[..., 1:] == ids[..., :-1], absent, ids[..., 1:])
    ids = ids.sort(-1).values
    # A range begins at a block that does not follow another one, and ends at one that none follows.
    edge = torch.full_like(ids[..., :1], -2)
    begins = torch.where(ids != torch.cat((edge, ids[..., :-1]), -1) + 1, ids, absent)
    ends = torch.where(ids + 1 != torch.cat((ids[..., 1:], edge), -1), ids, absent)
    start, end = (x.sort(-1).values * config.block_size for x in (begins, ends))
    end = torch.minimum(end + config.block_size, positions + 1)
    used = start < absent
    ranges = torch.stack((start, end), dim=-1)
    return sequences.restore(torch.where(used[..., None], ranges, -1).int())
