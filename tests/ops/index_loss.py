"""The loss of an index head on any backend, against its definition in fp64, query by query."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nsa.ops.index_loss import index_loss
from nsa.testing import assert_within_budget
from tests.ops.cases import leaf

if TYPE_CHECKING:
    from tests.ops.public import Case


class Head(NamedTuple):
    """An index head, and the blocks of the loss.

    Attributes:
        heads: index query heads per index key head.
        dim: Di.
        shared: whether all KV heads share one index key head.
        selected: whether the selected branch attends to selected blocks; otherwise to all.
        repeats: whether queries select a block twice.
    """

    heads: int = 1
    dim: int = 64
    shared: bool = False
    selected: bool = True
    repeats: bool = False


def inputs_of(case: Case, head: Head) -> tuple[list[Tensor], Tensor | None]:
    """Index queries and keys, queries and keys; block indices.

    Index products are exact in every dtype if their scale is a power of two. Then all
    implementations find the same maxima, and many are equal.
    """
    x = case.inputs()
    key_heads = 1 if head.shared else case.config.num_kv_heads
    q_idx = case.normal(len(x.q), key_heads * head.heads, head.dim, seed=5)
    k_idx = case.normal(len(x.k_slc), key_heads, head.dim, seed=6)
    if head.dim in (16, 64):
        q_idx, k_idx = (2 * q_idx).round() / 2, (2 * k_idx).round() / 2
    ids = case.block_indices() if head.selected else None
    if ids is not None and head.repeats:
        ids[::2, :, -1] = ids[::2, :, 0]
    return [q_idx, k_idx, 1.5 * x.q, x.k_slc], ids


def run_loss(case: Case, head: Head) -> dict[str, Tensor]:
    """Sum, count and gradients, which queries and keys of the selected branch do not have."""
    tensors, ids = inputs_of(case, head)
    leaves = [leaf(x, case.dtype) for x in tensors]
    q_idx, k_idx, q, k = (case.shaped(x) for x in leaves)
    ids = None if ids is None else case.shaped(ids)
    options = case.offsets(case.inputs())
    total, count = index_loss(q_idx, k_idx, q, k, ids, case.config, **options)
    assert total.dtype == torch.promote_types(case.dtype, torch.float32)
    dq, dk, *others = torch.autograd.grad(total, leaves, allow_unused=True)
    assert others == [None, None]
    return {"total": total.detach()[None], "count": count, "dq_idx": dq, "dk_idx": dk}


def expected_loss(case: Case, head: Head, dtype: torch.dtype) -> dict[str, Tensor]:
    """The definition in at least fp32; results and gradients of products rounded to ``dtype``."""
    tensors, ids = inputs_of(case, head)
    leaves = [leaf(x.cpu(), torch.promote_types(dtype, torch.float32)) for x in tensors]
    x, total, count = case.inputs(), leaves[0].sum() * 0.0 + leaves[1].sum() * 0.0, 0
    edges = zip(pairwise(x.cu_seqlens_q.tolist()), pairwise(x.cu_seqlens_k.tolist()), strict=True)
    for (first_q, end_q), (first_k, end_k) in edges:
        bounds = 2 * [slice(first_q, end_q), slice(first_k, end_k)]
        parts = [y[rows] for y, rows in zip(leaves, bounds, strict=True)]
        for row in range(end_q - first_q):
            t = end_k - first_k - (end_q - first_q) + row
            for g in range(case.config.num_kv_heads):
                named = None if ids is None else {*ids[first_q + row, g].tolist()}
                loss = _loss_of_query(case, head, parts, row, t, g, named, dtype)
                if loss is not None:
                    total, count = total + loss, count + 1
    dq, dk = (grad.to(dtype) for grad in torch.autograd.grad(total, leaves[:2]))
    return {"total": total.detach()[None], "count": torch.tensor(count), "dq_idx": dq, "dk_idx": dk}


def _loss_of_query(
    case: Case,
    head: Head,
    parts: list[Tensor],
    row: int,
    t: int,
    g: int,
    named: set[int] | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """Loss of the query at t, and KV head g; None without a block to rank."""
    q_idx, k_idx, q, k = parts
    config, size = case.config, case.config.block_size
    own = t // size
    forced = [
        j for j in range(own + 1) if j < config.num_init_blocks or j > own - config.num_local_blocks
    ]
    attended = [j for j in range(own + 1) if named is None or j in named]
    ranked = [j for j in attended if j not in forced]
    if not ranked:
        return None

    def by_block(products: Tensor, blocks: list[int]) -> list[Tensor]:
        return [products[:, j * size : min((j + 1) * size, t + 1)] for j in blocks]

    group = config.num_heads // config.num_kv_heads
    products = q[row, g * group : (g + 1) * group] @ k[: t + 1, g].T * config.head_dim**-0.5
    lse = torch.cat(by_block(products, attended), 1).logsumexp(1, keepdim=True)
    mass = torch.stack([(x - lse).exp().sum(1).mean() for x in by_block(products, ranked)])
    target = (mass / mass.sum()).detach()
    key_head = 0 if head.shared else g
    heads = slice(key_head * head.heads, (key_head + 1) * head.heads)
    products = q_idx[row, heads] @ k_idx[: t + 1, key_head].T * head.dim**-0.5
    products.register_hook(lambda grad: grad.to(dtype).to(grad.dtype))
    lse = torch.cat(by_block(products, forced), 1).logsumexp(1).detach()
    largest = [x.gather(1, x.argmax(1, keepdim=True))[:, 0] for x in by_block(products, ranked)]
    score = torch.stack([(m - lse).exp().sum() for m in largest])
    return (target * (target.log() - (score / score.sum()).log())).sum()


def check_index_loss(case: Case, head: Head | None = None) -> None:
    """One head, or by default two, over selected and over all blocks; twice the same bits.

    By default at most 40 queries of each sequence, since the definition takes them one by one.
    """
    if head is None:
        if not case.dense:
            queries = tuple(min(number, 40) for number in case.queries)
            case = dataclasses.replace(case, lengths_q=queries)
        for selected in (True, False):
            check_index_loss(case, Head(heads=2, selected=selected))
        return
    found = run_loss(case, head)
    again = found if case.device == "cpu" else run_loss(case, head)
    exact = expected_loss(case, head, torch.float64)
    plain = expected_loss(case, head, case.dtype)
    count = int(exact["count"])
    assert found.pop("count") == count
    # Terms of the divergences cancel, so that no relative error is defined.
    assert abs(float(found["total"]) - float(exact["total"])) <= 1e-6 * count, head
    for name, x in found.items():
        name_of = f"index_loss {name}, {head}"
        assert torch.equal(x, again[name]), f"{name_of}: not the same bits again"
        if name != "total":
            assert_within_budget(x.cpu(), plain[name], exact[name], name_of, case.factor)
