"""Activation checkpointing: which layers, the same gradients bit for bit, and attention that is not computed twice."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.lm.recomputation import ATTENTION_OPERATORS
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.execution.activations import checkpoint_activations, kept_bytes
from nsa.train.loss import NextTokenLoss
from nsa.train.telemetry.layer_statistics import LayerStatistics
from tests.train.cases import MODEL, make_trainer, tiny_config

POLICIES = {
    "full": CheckpointingConfig("full"),
    "range": CheckpointingConfig("range", first=1, last=2),
    "every": CheckpointingConfig("every", every=2),
    "operators": CheckpointingConfig("operators"),
}


class Count(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *operators: Any) -> int:
        return sum(self.runs[str(operator)] for operator in operators)


def make_loss(
    attention: str, policy: CheckpointingConfig | None, num_layers: int = 4
) -> NextTokenLoss:
    torch.manual_seed(0)
    model = LanguageModel(dataclasses.replace(MODEL, attention=attention, num_layers=num_layers))  # type: ignore[arg-type]
    if policy is not None:
        checkpoint_activations(model, policy)
    return NextTokenLoss(model)


def gradients(loss: Any, num_tokens: int = 90) -> list[Tensor]:
    """Of two packed sequences."""
    tokens = torch.randint(0, 256, (num_tokens,), generator=torch.Generator().manual_seed(1))
    loss(
        tokens, tokens, torch.tensor([0, 31, num_tokens], dtype=torch.int32), num_tokens
    ).backward()
    return [parameter.grad.clone() for parameter in loss.parameters()]


def test_policy_says_what_each_layer_keeps() -> None:
    keeps = {
        name: [policy.keeps(layer)[0] for layer in range(4)] for name, policy in POLICIES.items()
    }
    assert keeps == {
        "full": [*"iiii"],
        "range": [*"eiie"],
        "every": [*"eiei"],
        "operators": [*"aaaa"],
    }
    assert {CheckpointingConfig().keeps(layer) for layer in range(4)} == {"everything"}


@pytest.mark.parametrize(
    ("attention", "policy"),
    [
        ("nsa", "full"),
        ("nsa", "range"),
        ("nsa", "every"),
        ("dense", "full"),
        ("dense", "operators"),
    ],
)
def test_gradients_are_equal_bit_for_bit(attention: str, policy: str) -> None:
    wanted = gradients(make_loss(attention, None))
    with Count() as once:
        gradients(make_loss(attention, None))
    with Count() as count:
        found = gradients(make_loss(attention, POLICIES[policy]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    norms = torch.ops.aten._fused_rms_norm.default, torch.ops.aten.rsqrt.default
    assert count.of(*norms) > once.of(*norms)  # something is computed twice
    twice = {"full": 8, "range": 6, "every": 6, "operators": 4}
    if attention == "dense":
        assert (once.of(*ATTENTION_OPERATORS), count.of(*ATTENTION_OPERATORS)) == (4, twice[policy])


@pytest.mark.parametrize(("attention", "policy"), [("nsa", "full"), ("dense", "operators")])
def test_compiled_as_one_graph(attention: str, policy: str) -> None:
    """The tracer's own backend stands in for a C++ compiler, which takes minutes."""
    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    plain, loss = (
        make_loss(attention, None, num_layers=1),
        make_loss(attention, POLICIES[policy], num_layers=1),
    )
    statistics = [LayerStatistics(module.model) for module in (plain, loss)]
    for layers in statistics:
        layers.start()
    wanted, found = gradients(plain), gradients(compiler(loss))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    rows = []
    for layers in statistics:
        layers.stop(lambda sums: sums, lambda sums: sums)
        rows.append({name: value for name, value in layers.row().items() if "calls" not in name})
    assert rows[0] == rows[1]
    assert (len(rows[0]) > 0) == (attention == "nsa")


def test_nothing_is_computed_twice_without_gradients() -> None:
    loss = make_loss("dense", POLICIES["full"])
    tokens = torch.arange(20)
    with Count() as count, torch.no_grad():
        loss.model(tokens)
        loss.model(tokens, cache=loss.model.new_cache())
    with Count() as plain, torch.no_grad():
        unchanged = make_loss("dense", None).model
        unchanged(tokens)
        unchanged(tokens, cache=unchanged.new_cache())
    assert count.of(torch.ops.aten.mm.default) == plain.of(torch.ops.aten.mm.default)


def test_a_run_is_the_same_run(tmp_path: Path) -> None:
    results = []
    for policy in (CheckpointingConfig(), CheckpointingConfig("every", every=1)):
        trainer = make_trainer(
            tiny_config(tmp_path, checkpointing=policy), tmp_path / policy.policy
        )
        results.append(torch.stack([trainer.train_step(trainer.next_batches()) for _ in range(2)]))
    assert torch.equal(*results)


def test_bad_policies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="first must be left at 0 with policy full, got 1"):
        CheckpointingConfig("full", first=1)
    with pytest.raises(ValueError, match=r"last must be at least first \(3\), got 1"):
        CheckpointingConfig("range", first=3, last=1)
    with pytest.raises(
        ValueError, match=r"checkpointing\.last must be below model\.num_layers \(12\), got 12"
    ):
        TrainConfig(checkpointing=CheckpointingConfig("range", last=12))
    with pytest.raises(
        ValueError, match=r"checkpointing\.policy must not be operators with attention nsa on a CPU"
    ):
        make_trainer(tiny_config(tmp_path, checkpointing=POLICIES["operators"]), tmp_path / "run")


def test_kept_bytes_of_the_seed_layer() -> None:
    seed = LMConfig()
    assert kept_bytes(seed, "input") == {"input": 4 * 768}
    kept = kept_bytes(seed, "attention")
    assert kept["out"] == kept["out_cmp"] == kept["out_slc"] == kept["out_win"] == 2 * 768
    assert kept["lse_cmp"] == kept["lse_slc"] == kept["lse_win"] == 4 * 12
    assert kept["block_indices"] == kept["order"] == 4 * 2 * 16
    assert sum(kept.values()) == 9616  # as docs/planning.md says
    dense = dataclasses.replace(seed, attention="dense")
    assert kept_bytes(dense, "attention", activation_bytes=4) == {
        "input": 3072,
        "out": 3072,
        "lse": 48,
    }
