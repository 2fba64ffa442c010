"""Optimizers over fp32 master weights: decay groups, AdamW, Muon, learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.errors import check
from nsa.lm.model import LanguageModel
from nsa.module import Compression, GateLinear
from nsa.ops.muon import normalized, update_momenta, update_weights
from nsa.train.config import OptimConfig
from nsa.train.distributed.processes import first_row, gather_part, is_sharded, own_part

# Runs an update with its argument: by a call, or by replaying a CUDA graph.
Through = Callable[[Callable[[Tensor], None], Tensor], None]

INDEX_WEIGHTS = "_idx_"  # part of the names of an index's weights

# Newton-Schulz iterations of a x + b x^3 + c x^5, which drives singular values towards 1.
COEFFICIENTS, ITERATIONS = (3.4445, -4.775, 2.0315), 5
BATCH_ELEMENTS = 2**23  # of matrices that are multiplied in one batch


def run_now(update: Callable[[Tensor], None], cancel: Tensor) -> None:
    """Run an update without a CUDA graph."""
    update(cancel)


@dataclass(frozen=True)
class ParameterGroups:
    """Trainable parameters by optimizer, each with its name in the model.

    Attributes:
        muon: matrices that Muon takes; empty with AdamW.
        decayed: matrices that AdamW decays.
        plain: embedding, norms, biases and the other vectors, which are not decayed.
        index: projections of the index with a learning rate of their own, which AdamW decays.
    """

    muon: dict[str, nn.Parameter]
    decayed: dict[str, nn.Parameter]
    plain: dict[str, nn.Parameter]
    index: dict[str, nn.Parameter]


def parameter_groups(model: LanguageModel, config: OptimConfig) -> ParameterGroups:
    """Sort the trainable parameters of ``model``.

    Decayed are the matrices of linear layers and of phi ``mlp``. A tied head is the embedding and
    is not. Muon takes the projections of attention and MLP; gates, phi and the head stay with
    AdamW.

    Raises:
        ValueError: a trainable parameter is not fp32: optimizers work on master weights.
    """
    layers = model.decoder_layers()
    children = [c for layer in layers for c in (*layer.attention.children(), *layer.mlp.children())]
    projections = {child.weight for child in children if isinstance(child, nn.Linear)}
    matrices = set[Tensor]()
    for module in model.modules():
        if isinstance(module, nn.Linear | GateLinear):
            matrices.add(module.weight)
        elif isinstance(module, Compression) and module.phi == "mlp":
            matrices |= {module.w1, module.w2}
    matrices.discard(model.embedding.weight)
    groups = ParameterGroups({}, {}, {}, {})
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_master, rule = parameter.dtype == torch.float32, "be an fp32 master weight"
        check(is_master, key, rule, parameter.dtype)
        if config.index_lr is not None and INDEX_WEIGHTS in key:
            groups.index[key] = parameter
        elif config.name == "muon" and parameter in projections:
            groups.muon[key] = parameter
        else:
            (groups.decayed if parameter in matrices else groups.plain)[key] = parameter
    return groups


class ModelOptimizer:
    """Optimizers of a model; every trainable parameter is in exactly one.

    The state of all parameters exists from the start, so that a checkpoint can be loaded into it
    and memory does not grow at the first step.

    Args:
        model: the model; its trainable parameters are fp32.
        config: which optimizer, its rates and decay.
    """

    def __init__(self, model: LanguageModel, config: OptimConfig) -> None:
        groups = parameter_groups(model, config)
        of_adamw = {**groups.decayed, **groups.plain, **groups.index}
        self.named: dict[str, nn.Parameter] = {**groups.muon, **of_adamw}
        decayed = {"weight_decay": config.weight_decay}
        parts = [
            {"params": list(groups.decayed.values()), **decayed},
            {"params": list(groups.plain.values()), "weight_decay": 0.0},
        ]
        if groups.index:
            parts.append({"params": list(groups.index.values()), "lr": config.index_lr, **decayed})
        self.adamw = torch.optim.AdamW(
            parts, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        self.muon: Muon | None = None
        if groups.muon:
            self.muon = Muon(groups.muon.values(), config.muon_lr, config.weight_decay)
        for parameter in of_adamw.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._peaks = [
            (group, group["lr"])
            for optimizer in (self.adamw, self.muon)
            for group in (optimizer.param_groups if optimizer else ())
        ]

    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters."""
        return list(self.named.values())

    def set_lr(self, factor: float) -> None:
        """Set every learning rate to ``factor`` times its peak."""
        for group, peak in self._peaks:
            group["lr"] = peak * factor

    @property
    def learning_rate(self) -> float:
        """Current learning rate of AdamW."""
        rate: float = self.adamw.param_groups[0]["lr"]
        return rate

    def step(self, cancel: Tensor, through: Through = run_now) -> None:
        """Update all parameters; if ``cancel`` is 1, they and the optimizer state do not change.

        Args:
            cancel: fp32 scalar on the parameters' device, 0 or 1; the host does not wait for it.
            through: see :meth:`Muon.step`; AdamW needs few launches and no graph.
        """
        # How PyTorch's fused optimizers take the flag.
        self.adamw.found_inf = cancel  # type: ignore[attr-defined]
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(cancel, through)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.named.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Live optimizer state by ``<parameter>.<state>``, to be saved or loaded into."""
        states = {**self.adamw.state, **(self.muon.state if self.muon else {})}
        return {
            f"{name}.{key}": value
            for name, parameter in self.named.items()
            for key, value in states[parameter].items()
        }


def lr_factor(step: int, num_steps: int, warmup_steps: int, min_ratio: float = 0.0) -> float:
    """Factor on the peak learning rate of an optimizer step: linear warm-up, then a cosine.

    It depends on the optimizer step alone, not on micro-batches.

    Args:
        step: optimizer steps already done; the first update is step 0.
        num_steps: optimizer steps of the run.
        warmup_steps: steps of the linear rise; step ``warmup_steps - 1`` is the first at the peak.
        min_ratio: end of the cosine, reached after the last step, so that the last update has a
            rate above 0.

    Returns:
        A factor from 0 to 1, above 0 for every step of the run unless the cosine has ended.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(num_steps - warmup_steps, 1), 1.0)
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


# --- Muon -----------------------------------------------------------------------------------------
class Muon(torch.optim.Optimizer):
    """Muon (K. Jordan and others, 2024): orthogonalised Nesterov momentum with decoupled decay.

    State and rates are those of ``torch.optim.Muon``, and so are results in bf16 up to rounding.
    PyTorch's optimizer multiplies in bf16 even on a CPU without instructions for it, where fp32 is
    17 times as fast, and cannot cancel a step. Matrices of one shape are multiplied in batches,
    which saves three quarters of the launches.

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

        Gradients may be overwritten.

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
        rows, columns = matrices[0].shape
        decay, factor = self.param_groups[0]["weight_decay"], max(1.0, rows / columns) ** 0.5
        momenta = [own_part(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = [own_part(_gradient(matrix)) for matrix in matrices]
        ahead, squares = update_momenta(momenta, gradients, cancel, product_dtype(cancel.device))
        if is_sharded(matrices[0]):
            parts = zip(ahead, matrices, strict=True)
            ahead, squares = torch.stack([gather_part(*part) for part in parts]), None
        weights, begin = [own_part(matrix.detach()) for matrix in matrices], first_row(matrices[0])
        updates = orthogonalized(ahead, squares)[:, begin : begin + weights[0].shape[0]]
        update_weights(weights, updates, self._lr, decay, factor, cancel)


def batches_of(matrices: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group matrices by shape in batches of at most ``BATCH_ELEMENTS``, at least one matrix."""
    by_shape: dict[torch.Size, list[nn.Parameter]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.shape, []).append(matrix)
    found = []
    for shape, same in by_shape.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        found += [same[begin : begin + size] for begin in range(0, len(same), size)]
    return found


def _gradient(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None
    return matrix.grad


def product_dtype(device: torch.device) -> torch.dtype:
    """Dtype of the matrix products: the fastest one of the device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def orthogonalized(x: Tensor, squares: Tensor | None = None) -> Tensor:
    """Bring the singular values of matrices ``[N, rows, columns]`` to about 1 (0.7 to 1.2).

    Newton-Schulz iterations start from the smaller side, so that no matrix is transposed in memory.
    See :func:`nsa.ops.muon.normalized` for ``squares``.
    """
    x = normalized(x, squares)
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    for _ in range(ITERATIONS):
        gram = x.mT @ x if is_tall else x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, gram) if is_tall else (gram, x)), beta=a)
    return x
