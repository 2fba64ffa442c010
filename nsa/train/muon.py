"""Muon (K. Jordan and others, 2024), with steps that can be cancelled, in fp32 on a CPU.

``torch.optim.Muon`` multiplies in bf16 wherever it runs, which takes 17 times as long as fp32 on a
CPU without instructions for it, and cannot be told to skip a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from nsa.train.distributed.processes import gather, own_part, own_rows

# Runs an update with its argument: by a call, or by replaying a CUDA graph.
Through = Callable[[Callable[[Tensor], None], Tensor], None]

MOMENTUM = 0.95
# Newton-Schulz iterations of a x + b x^3 + c x^5, which drives singular values towards 1.
COEFFICIENTS, ITERATIONS = (3.4445, -4.775, 2.0315), 5
BATCH_ELEMENTS = 2**23  # of matrices that are multiplied in one batch


def run_now(update: Callable[[Tensor], None], cancel: Tensor) -> None:
    """Run an update without a CUDA graph."""
    update(cancel)


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalised Nesterov momentum with decoupled weight decay.

    State and rates are those of ``torch.optim.Muon``, and so are results in bf16 up to rounding.
    Matrices of one shape are multiplied in batches, which saves three quarters of the launches.

    Args:
        matrices: fp32 parameters; with FSDP2 every process gathers them and computes the same.
        lr: learning rate; it grows with sqrt(rows / columns) of a matrix with more rows.
        weight_decay: decay of a step relative to ``lr``.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        params = self.param_groups[0]["params"]
        for matrix in params:
            self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix)}
        self._lr = torch.zeros((), dtype=torch.float64, device=params[0].device)

    def step(self, cancel: Tensor, through: Through = run_now) -> None:  # type: ignore[override]
        """Update all matrices; if ``cancel`` is 1, they and their momentum do not change.

        Gradients are overwritten.

        Args:
            cancel: fp32 scalar, 0 or 1; the host does not wait for it.
            through: calls the update with ``cancel``, or replays it as a CUDA graph; the update
                reads its rate from the device.
        """
        self._lr.fill_(self.param_groups[0]["lr"])
        through(self._update_all, cancel)

    @torch.no_grad()
    def _update_all(self, cancel: Tensor) -> None:
        """Update all matrices with the same launches each time; the rate is on the device."""
        for matrices in batches_of(self.param_groups[0]["params"]):
            self._update(matrices, cancel)

    def _update(self, matrices: Sequence[nn.Parameter], cancel: Tensor) -> None:
        """Update matrices of one shape; on a GPU this takes 8 bytes per element."""
        lr, decay = self._lr, self.param_groups[0]["weight_decay"]
        rows, columns = matrices[0].shape
        live = 1 - cancel
        kept = (live * (1 - lr * decay) + cancel).float()
        rate = (live * (lr * max(1.0, rows / columns) ** 0.5)).float()
        ahead = self._look_ahead(matrices, cancel.bool())
        updates = orthogonalized(ahead)
        weights = [own_part(matrix.detach()) for matrix in matrices]
        torch._foreach_mul_(weights, kept)
        for matrix, weight, update in zip(matrices, weights, updates, strict=True):
            weight.addcmul_(own_rows(matrix, update), rate, value=-1)

    def _look_ahead(self, matrices: Sequence[nn.Parameter], keep: Tensor) -> Tensor:
        """Update the momenta and return Nesterov's estimates in the dtype of the products.

        If the update is cancelled, the momentum replaces the gradient, which may be NaN.
        """
        momenta = [own_part(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = [own_part(_gradient(matrix)) for matrix in matrices]
        for momentum, gradient in zip(momenta, gradients, strict=True):
            torch.where(keep, momentum, gradient, out=gradient)
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        torch._foreach_lerp_(gradients, momenta, MOMENTUM)
        dtype = product_dtype(keep.device)
        return torch.stack([gather(_gradient(matrix).to(dtype)) for matrix in matrices])


def batches_of(matrices: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group matrices by shape in batches of at most ``BATCH_ELEMENTS``, at least one matrix."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    found = []
    for shape, alike in by_shape.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        found += [alike[begin : begin + size] for begin in range(0, len(alike), size)]
    return found


def _gradient(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


def product_dtype(device: torch.device) -> torch.dtype:
    """Dtype of the matrix products: the fastest one of the device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(x: Tensor) -> Tensor:
    """Bring the singular values of matrices ``[N, rows, columns]`` to about 1 (0.7 to 1.2).

    Newton-Schulz iterations start from the smaller side, so that no matrix is transposed in memory.
    """
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(ITERATIONS):
        gram = x.mT @ x if is_tall else x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, gram) if is_tall else (gram, x)), beta=a)
    return x
