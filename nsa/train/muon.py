"""Muon (K. Jordan and others, 2024), with steps that can be cancelled, in fp32 on a CPU.

``torch.optim.Muon`` multiplies in bf16 wherever it runs, which takes 17 times as long as fp32 on a
CPU without instructions for it, and cannot be told to skip a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nsa.train.distributed.sharding import gather, put

MOMENTUM = 0.95
# Of the polynomial a x + b x^3 + c x^5, which drives singular values towards 1, and how often.
COEFFICIENTS, ITERATIONS = (3.4445, -4.775, 2.0315), 5


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's look ahead, made orthogonal; decay apart from it.

    State and rates are those of ``torch.optim.Muon``, and so are results in bf16, as on a GPU.

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
        lr, decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        keep = cancel.bool()
        for matrix, state in self.state.items():
            momentum = state["momentum_buffer"]
            assert matrix.grad is not None
            old, gradient, before = gather(matrix), gather(matrix.grad), gather(momentum)
            after = before.lerp(gradient, 1 - MOMENTUM)
            update = orthogonalized(gradient.lerp(after, MOMENTUM), product_dtype(old.device))
            rate = lr * max(1.0, old.shape[0] / old.shape[1]) ** 0.5
            new = (old * (1 - lr * decay)).add_(update, alpha=-rate)
            put(momentum, torch.where(keep, before, after))
            put(matrix.detach(), torch.where(keep, old, new))


def product_dtype(device: torch.device) -> torch.dtype:
    """Of the products: what multiplies fastest wherever code runs."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix with its singular values brought to about 1 (0.7 to 1.2), in ``dtype``.

    By Newton-Schulz iterations on the smaller side.
    """
    is_tall = x.shape[0] > x.shape[1]
    y = x.to(dtype, copy=True)
    y = y.T if is_tall else y
    y.div_(y.norm().clamp(min=1e-7))
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if is_tall else y
