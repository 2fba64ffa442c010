"""Useful work of an operator: only keys that a query may see and, if selected, that it selected.

A pair is one query position and one key that it attends to. A query head of D and Dv does two
matrix products a pair forward (scores, output: ``2 D + 2 Dv`` operations) and five more backward
(scores again, dP, dV, dQ, dK: ``6 D + 4 Dv``).
"""

from __future__ import annotations

import numpy as np

from nsa.bench.cases import Problem

_BRANCHES = ("attention.compressed", "attention.selected", "attention.window")


def pairs(name: str, problem: Problem) -> int:
    """Pairs of one sequence and head: of a branch, or of ``dense`` causal attention.

    The own block of a query is always selected (``num_local_blocks`` is at least 1), so the count
    does not depend on the others.
    """
    config, t = problem.config, np.arange(problem.point.seq_len)
    if name == "attention.window":
        return int(np.minimum(t + 1, config.window_size).sum())
    if name == "attention.compressed":
        blocks = (t + 1 - config.compress_block_size) // config.compress_stride + 1
        return int(np.maximum(blocks, 0).sum())
    if name == "attention.selected":
        n = np.full(len(t), config.num_selected_blocks)
        for length, fewer in reversed(config.block_counts):
            n[:length] = fewer
        size = config.block_size
        return int(((np.minimum(t // size + 1, n) - 1) * size + t % size + 1).sum())
    assert name == "dense"
    return int((t + 1).sum())


def useful_flops(problem: Problem, *, backward: bool, dense: bool = False) -> int | None:
    """Useful operations of a case, or of dense attention instead; None if it only moves bytes.

    The whole counts its three branches; selection counts one product with every visible compressed
    key, which in the whole is the compressed branch's own and not counted again.
    """
    name, config = problem.case.name, problem.config
    heads = problem.point.batch * config.num_heads
    if name == "attention.choice":
        return pairs("attention.compressed", problem) * heads * 2 * config.head_dim
    branches = {"attention": _BRANCHES, **{branch: (branch,) for branch in _BRANCHES}}
    counted = ("dense",) if dense else branches.get(name)
    if counted is None:
        return None
    operations = 2 * config.head_dim + 2 * config.value_dim
    if backward:
        operations += 6 * config.head_dim + 4 * config.value_dim
    return sum(pairs(each, problem) for each in counted) * heads * operations


def useful_bytes(problem: Problem, *, backward: bool) -> int:
    """Bytes that must move at least.

    Forward each input and output once; backward the gradients of both, and the inputs again where
    they are needed (``attention.combine``).
    """
    case, tensors = problem.case, problem.tensors
    inputs = sum(tensors[name].nbytes for name in case.inputs)
    outputs = sum(tensors[f"d{name}"].nbytes for name in case.outputs)
    again = inputs if case.name == "attention.combine" else 0
    return inputs + outputs + backward * (inputs + outputs + again)
