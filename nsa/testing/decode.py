"""Decode caches filled with random tokens, and a reference decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention import AttentionInputs
from nsa.cache import NSACache
from nsa.cache.chunk import Chunk, Step
from nsa.config import NSAConfig
from nsa.ops._sequences import Sequences
from nsa.ops.decode import CacheTensors
from nsa.rope import Rope

# Fields with keys and values of a layer; the others are tables and counters.
_STORED = CacheTensors._fields[:9]


def fill_cache(cache: NSACache, count: int) -> None:
    """Append ``count`` random tokens to each sequence of a cache.

    Keys and values are Gaussian; compressed ones have the standard deviation of means.

    Args:
        cache: cache with reserved memory, which needs a first token in each layer.
        count: tokens of each sequence.

    Raises:
        ValueError: the cache is full. It is unchanged.
    """
    counts = [count] * cache.batch_size
    cache.reserve(counts)
    generator = torch.Generator(device=cache.device_lengths.device).manual_seed(2)
    for layer in cache.layers:
        assert layer.tensors is not None
        small = layer.config.compress_block_size**-0.5
        for name in _STORED:
            x = getattr(layer.tensors, name)
            if x is not None:
                x.normal_(std=small if name.endswith("cmp") else 1.0, generator=generator)
    cache.advance(counts)
    cache.device_lengths.add_(count)


def reference_step(
    config: NSAConfig,
    tensors: CacheTensors,
    length: int,
    inputs: AttentionInputs,
    rope: Rope,
    sequence: int,
    dtype: torch.dtype,
) -> Tensor:
    """Reference decode step of one sequence, on a copy of its part of a cache.

    Args:
        config: the sparse pattern of the layer.
        tensors: the layer's memory, which is not modified.
        length: cached tokens of the sequence.
        inputs: new tokens, the same number for each sequence.
        rope: rotates the compressed keys.
        sequence: index of the sequence.
        dtype: dtype of the computation.

    Returns:
        ``[T, Hq, Dv]``.
    """
    batch, device = tensors.num_sequences, tensors.table.device
    pages = tensors.table[sequence, : -(-(length + 1) // config.block_size)].long()
    stored = dict[str, Tensor | None]()
    for name in _STORED:
        x: Tensor | None = getattr(tensors, name)
        if x is not None and name.endswith(("slc", "cmp", "idx")):
            per_page = config.block_size // (config.compress_stride if "cmp" in name else 1)
            x = x.unflatten(0, (-1, per_page))[pages].flatten(0, 1)
        elif x is not None:
            x = x.unflatten(0, (batch, -1))[sequence]
        stored[name] = None if x is None else x.to(dtype, copy=True)
    own = CacheTensors(
        **stored,
        table=torch.arange(len(pages), dtype=torch.int32, device=device)[None],
        lengths=tensors.lengths[sequence : sequence + 1],
        counters=tensors.counters,
    )
    count = inputs.q.shape[0] // batch
    rows = slice(sequence * count, (sequence + 1) * count)
    parts = (x[rows].to(dtype) if isinstance(x, Tensor) else x for x in inputs)
    new = AttentionInputs._make(parts)
    where = Sequences(None, 1, count, count, device)
    step = Step(where, [length], [count], set())
    return Chunk(config, own, step, where, "reference").attend(new, rope, None)[0]
