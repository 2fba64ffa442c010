"""Optimizers over fp32 master weights: decay groups, AdamW, Muon, updates that can be cancelled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.errors import check
from nsa.lm.model import LanguageModel
from nsa.module import Compression, GateLinear
from nsa.train.config import OptimConfig
from nsa.train.muon import Muon, Through


@dataclass(frozen=True)
class ParameterGroups:
    """Trainable parameters by how they are optimized, each with its name in the model.

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
    """The optimizers of a model as one: every trainable parameter belongs to exactly one of them.

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
        parts = [part for part in parts if part["params"]]
        self.adamw = torch.optim.AdamW(
            parts, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        for parameter in (*groups.decayed.values(), *groups.plain.values()):
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self._optimizers: list[torch.optim.Optimizer] = [self.adamw]
        self.muon: Muon | None = None
        if groups.muon:
            self.muon = Muon(groups.muon.values(), config.muon_lr, config.weight_decay)
            self._optimizers.append(self.muon)
        rates = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._peaks = [(group, group["lr"]) for group in rates]

    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters."""
        return list(self.named.values())

    def set_lr(self, factor: float) -> None:
        """Set every learning rate to ``factor`` times its peak."""
        for group, peak in self._peaks:
            group["lr"] = peak * factor

    @property
    def learning_rate(self) -> float:
        """AdamW's rate, now in force."""
        rate: float = self.adamw.param_groups[0]["lr"]
        return rate

    def step(self, cancel: Tensor, through: Through | None = None) -> None:
        """Update all parameters; if ``cancel`` is 1, they and the optimizer state keep their bits.

        Args:
            cancel: fp32 scalar on the parameters' device, 0 or 1; the host does not wait for it.
            through: see :meth:`nsa.train.muon.Muon.step`; AdamW is few launches.
        """
        # How PyTorch's fused optimizers take the flag.
        self.adamw.found_inf = cancel  # type: ignore[attr-defined]
        self.adamw.step()
        if self.muon is not None:
            self.muon.step(cancel, through)

    def zero_grad(self, *, drop: bool = True) -> None:
        """Drop all gradients, or make them zero where they are."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=drop)

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state by ``<parameter>.<state>``: to be saved, and to be loaded into."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.named.items():
            for optimizer in self._optimizers:
                state = optimizer.state.get(parameter, {})
                found |= {f"{name}.{key}": value for key, value in state.items()}
        return found
