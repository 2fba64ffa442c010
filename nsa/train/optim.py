"""Optimizers over fp32 master weights: decay groups, AdamW, Muon, learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.errors import check
from nsa.lm.model import LanguageModel
from nsa.module import Compression, GateLinear
from nsa.train.config import OptimConfig
from nsa.train.muon import Muon, Through, run_now


@dataclass(frozen=True)
class ParameterGroups:
    """Trainable parameters by optimizer, each with its name in the model.

    Attributes:
        muon: matrices that Muon takes; empty with AdamW.
        decayed: matrices that AdamW decays.
        plain: embedding, norms, biases and the other vectors, which are not decayed.
    """

    muon: dict[str, nn.Parameter]
    decayed: dict[str, nn.Parameter]
    plain: dict[str, nn.Parameter]


def parameter_groups(model: LanguageModel, name: str = "adamw") -> ParameterGroups:
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
    groups = ParameterGroups({}, {}, {})
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_master, rule = parameter.dtype == torch.float32, "be an fp32 master weight"
        check(is_master, "parameter_groups", key, rule, parameter.dtype)
        if name == "muon" and parameter in projections:
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
        groups = parameter_groups(model, config.name)
        self.named: dict[str, nn.Parameter] = {**groups.muon, **groups.decayed, **groups.plain}
        parts = [
            {"params": list(groups.decayed.values()), "weight_decay": config.weight_decay},
            {"params": list(groups.plain.values()), "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            parts, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        self.muon: Muon | None = None
        if groups.muon:
            self.muon = Muon(groups.muon.values(), config.muon_lr, config.weight_decay)
        for parameter in (*groups.decayed.values(), *groups.plain.values()):
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
            through: see :meth:`nsa.train.muon.Muon.step`; AdamW needs few launches and no graph.
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
