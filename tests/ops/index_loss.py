"""The loss of an index head on any backend, against a formula in fp64, query by query."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import torch
from torch import Tensor

from nsa.ops.index_loss import index_loss
from tests.ops.public import Case, compare, leaves_of

Named = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class IndexCase(Case):
    """Case of the loss.

    Attributes:
        index_heads: index query heads per index key head.
        index_dim: Di.
        shared: whether all KV heads share one index key.
        selected: whether the selected branch attends to selected blocks; otherwise to all.
        repeats: whether a query names a block twice.
    """

    index_heads: int = 1
    index_dim: int = 32
    shared: bool = False
    selected: bool = True
    repeats: bool = False

    def index_inputs(self, scale: float = 1.5) -> list[Tensor]:
        """Index queries and keys; then queries, keys and block indices of the selected branch."""
        x = self.inputs()
        key_heads = 1 if self.shared else self.config.num_kv_heads
        q_idx = self.normal(len(x.q), key_heads * self.index_heads, self.index_dim, seed=5)
        k_idx = self.normal(len(x.k_slc), key_heads, self.index_dim, seed=6)
        return [q_idx * scale, k_idx, x.q * scale, x.k_slc]

    def blocks(self) -> Tensor | None:
        if not self.selected:
            return None
        ids = self.block_indices()
        if self.repeats:
            ids[::2, :, -1] = ids[::2, :, 0]
        return ids


def run_loss(case: IndexCase, backend: str, dtype: torch.dtype, upstream: float = 1.0) -> Named:
    """Sum, count, and gradients, which queries and keys of the selected branch do not have."""
    x = case.inputs()
    leaves = leaves_of(*(y.to(dtype) for y in case.index_inputs()))
    ids = case.blocks()
    given = [case.shaped(y) for y in leaves]
    options = {**case.offsets(x), "backend": backend}
    ids = None if ids is None else case.shaped(ids)
    total, count = index_loss(*given, ids, case.config, **options)
    grads = torch.autograd.grad(total * upstream, leaves, allow_unused=True)
    assert grads[2:] == (None, None)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    names = ("dq_idx", "dk_idx")
    found = {
        n: torch.zeros_like(y) if g is None else g
        for n, y, g in zip(names, leaves, grads, strict=False)
    }
    return {"total": total.detach()[None], "count": count, **found}


def exact_loss(case: IndexCase) -> Named:
    """The definition in fp64."""
    leaves = leaves_of(*(y.double() for y in case.index_inputs()))
    x, ids, config = case.inputs(), case.blocks(), case.config
    total, count = leaves[0].sum() * 0.0 + leaves[1].sum() * 0.0, 0
    edges = zip(pairwise(x.cu_seqlens_q.tolist()), pairwise(x.cu_seqlens_k.tolist()), strict=True)
    for (first_q, end_q), (first_k, end_k) in edges:
        for row in range(first_q, end_q):
            t = end_k - first_k - (end_q - row)
            for g in range(config.num_kv_heads):
                named = None if ids is None else {*ids[row, g].tolist()}
                tokens = slice(first_k, first_k + t + 1)
                loss = _loss_of_query(case, leaves, row, tokens, g, named)
                if loss is not None:
                    total, count = total + loss, count + 1
    grads = torch.autograd.grad(total, leaves[:2])
    found = {"total": total.detach()[None], "count": torch.tensor(count)}
    return {**found, "dq_idx": grads[0], "dk_idx": grads[1]}


def _loss_of_query(
    case: IndexCase, leaves: list[Tensor], row: int, tokens: slice, g: int, named: set[int] | None
) -> Tensor | None:
    q_idx, k_idx, q, k = leaves
    config, size = case.config, case.config.block_size
    t = tokens.stop - tokens.start - 1
    own = t // size
    blocks = range(own + 1)
    forced = {j for j in blocks if j < config.num_init_blocks or j > own - config.num_local_blocks}
    attended = [j for j in blocks if named is None or j in named]
    ranked = [j for j in attended if j not in forced]
    if not ranked:
        return None
    of_block = [slice(j * size, min((j + 1) * size, t + 1)) for j in blocks]
    group = q.shape[1] // config.num_kv_heads
    products = q[row, g * group : (g + 1) * group] @ k[tokens, g].T * q.shape[-1] ** -0.5
    weights = products.exp()
    mass = torch.stack([weights[:, of_block[j]].sum(1) for j in ranked])
    mass = (mass / sum(weights[:, of_block[j]].sum(1) for j in attended)).mean(1).detach()
    target = mass / mass.sum()
    key_head = 0 if case.shared else g
    heads = slice(key_head * case.index_heads, (key_head + 1) * case.index_heads)
    products = q_idx[row, heads] @ k_idx[tokens, key_head].T * case.index_dim**-0.5
    lse = torch.cat([products[:, of_block[j]] for j in forced], 1).logsumexp(1).detach()
    largest = torch.stack([products[:, of_block[j]].amax(1) for j in ranked])
    score = (largest - lse).exp().sum(1)
    return (target * (target.log() - (score / score.sum()).log())).sum()


def check_index_loss(case: IndexCase) -> None:
    exact = exact_loss(case)
    found = run_loss(case, case.backend, case.dtype)
    plain = run_loss(case, "reference", case.dtype)
    count = exact.pop("count")
    assert count > 0
    assert found.pop("count") == plain.pop("count") == count
    compare(found, plain, exact, "index_loss", case.factor)
