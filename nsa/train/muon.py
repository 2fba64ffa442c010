"""Muon (K. Jordan and others, 2024), with steps that can be cancelled, in fp32 on a CPU.

``torch.optim.Muon`` multiplies in bf16 wherever it runs, which takes 17 times as long as fp32 on a
CPU without instructions for it, and cannot be told to skip a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nsa.train.distributed.sharding import gather, put

MOMENTUM = 0.95
# Of the polynomial a x + b x^3 + c x^5, which drives singular values towards 1, and how often.
COEFFICIENTS, ITERATIONS = (3.4445, -4.775, 2.0315), 5
BATCH_ELEMENTS = 2**23  # of matrices that are multiplied together; a larger one is alone


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's look ahead, made orthogonal; decay apart from it.

    State and rates are those of ``torch.optim.Muon``; but for rounding so are results in bf16,
    as on a GPU. Matrices of one shape are multiplied together: a quarter of the launches.

    Args:
        matrices: fp32 parameters; of shards every process gathers the whole and computes the same.
        lr: learning rate; it grows with sqrt(rows / columns) of a matrix with more rows.
        weight_decay: share of the weights, times ``lr``, that a step takes away.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        for matrix in self.param_groups[0]["params"]:
            self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix)}

    @torch.no_grad()
    def step(self, cancel: Tensor) -> None:  # type: ignore[override]
        """Update all matrices; if ``cancel`` is 1, they and their momentum keep their bits.

        Args:
            cancel: scalar, 0 or 1; the host does not wait for it.
        """
        keep = cancel.bool()
        for matrices in batches_of(self.param_groups[0]["params"]):
            self._update(matrices, keep)

    def _update(self, matrices: Sequence[nn.Parameter], keep: Tensor) -> None:
        """Update matrices of one shape; 26 bytes an element are held meanwhile."""
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        old, before = _stacked(matrices), _stacked(momenta)
        gradient = _stacked(map(_gradient, matrices))
        after = before.lerp(gradient, 1 - MOMENTUM)
        update = orthogonalized(gradient.lerp_(after, MOMENTUM), product_dtype(old.device))
        rate = lr * max(1.0, old.shape[-2] / old.shape[-1]) ** 0.5
        new = (old * (1 - lr * decay)).add_(update, alpha=-rate)
        for target, kept, changed in ((momenta, before, after), (matrices, old, new)):
            torch.where(keep, kept, changed, out=changed)
            for part, whole in zip(target, changed, strict=True):
                put(part.detach(), whole)


def batches_of(matrices: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Matrices of one shape together, at most ``BATCH_ELEMENTS`` unless one alone has more."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    found = []
    for shape, alike in by_shape.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        found += [alike[begin : begin + size] for begin in range(0, len(alike), size)]
    return found


def _stacked(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([gather(tensor) for tensor in tensors])


def _gradient(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


def product_dtype(device: torch.device) -> torch.dtype:
    """Of the products: what multiplies fastest wherever code runs."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices ``[N, rows, columns]`` with singular values brought to about 1 (0.7 to 1.2).

    By Newton-Schulz iterations on the smaller side, in ``dtype``, which the result has, too.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    y = x.to(dtype, copy=True)
    y = y.mT if is_tall else y
    y.div_(torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7))
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if is_tall else y
