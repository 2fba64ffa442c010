"""Activation checkpointing: the same gradients bit for bit, and attention not computed twice."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.config import NSAConfig
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.lm.recomputation import ATTENTION_OPERATORS
from nsa.train.config import CheckpointingConfig
from nsa.train.execution.activations import checkpoint_activations, kept_bytes
from nsa.train.loss import NextTokenLoss
from nsa.train.telemetry.layer_statistics import LayerStatistics
from tests.train.cases import MODEL, PATTERN, all_equal, new_trainer

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
    attention: Any, policy: str = "", num_layers: int = 4, pattern: NSAConfig = PATTERN
) -> NextTokenLoss:
    torch.manual_seed(0)
    changes: dict[str, Any] = {"attention": attention, "num_layers": num_layers, "nsa": pattern}
    model = LanguageModel(dataclasses.replace(MODEL, **changes))
    if policy:
        checkpoint_activations(model, POLICIES[policy])
    return NextTokenLoss(model)


def gradients(loss: Any, num_tokens: int = 90) -> list[Tensor]:
    """Of two packed sequences."""
    loss.zero_grad()
    tokens = torch.randint(0, 256, (num_tokens,), generator=torch.Generator().manual_seed(1))
    offsets = torch.tensor([0, 31, num_tokens], dtype=torch.int32)
    loss(tokens, tokens, offsets, num_tokens).backward()
    return [parameter.grad.clone() for parameter in loss.parameters()]


def test_policy_says_what_each_layer_keeps():
    kept = {
        name: "".join(policy.keeps(layer)[0] for layer in range(4))
        for name, policy in POLICIES.items()
    }
    assert kept == {"full": "iiii", "range": "eiie", "every": "eiei", "operators": "aaaa"}
    assert CheckpointingConfig().keeps(0) == "everything"


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
def test_gradients_are_equal_bit_for_bit(attention, policy):
    with Count() as once:
        wanted = gradients(make_loss(attention))
    with Count() as count:
        found = gradients(make_loss(attention, policy))
    assert all_equal(found, wanted)
    norms = torch.ops.aten._fused_rms_norm.default, torch.ops.aten.rsqrt.default
    assert count.of(*norms) > once.of(*norms)  # something is computed twice
    twice = {"full": 8, "range": 6, "every": 6, "operators": 4}
    if attention == "dense":
        assert (once.of(*ATTENTION_OPERATORS), count.of(*ATTENTION_OPERATORS)) == (4, twice[policy])


@pytest.mark.parametrize(("attention", "policy"), [("nsa", "full"), ("dense", "operators")])
def test_compiled_as_one_graph(attention, policy):
    """The tracer's own backend stands in for a C++ compiler, which takes minutes. One graph serves
    steps of which statistics are taken and steps of which none are.
    """
    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    index: dict[str, Any] = {"scores": "index", "index_dim": 16, "index_rotary_dim": 8}
    quick = dataclasses.replace(PATTERN, **index, branches=("slc", "win"))
    found, rows = [], []
    for name, compiled in (("", lambda loss: loss), (policy, compiler)):
        loss = make_loss(attention, name, 1, quick)
        layers, step = LayerStatistics(loss.model), compiled(loss)
        found.append(gradients(step))
        for _ in range(2):
            with torch.compiler.set_stance("fail_on_recompile"):
                layers.start()
                found.append(gradients(step))
                layers.stop(lambda sums: sums, lambda sums: sums)
                row = layers.row()
                found.append(gradients(step))
            rows.append({name: value for name, value in row.items() if "calls" not in name})
    assert all(all_equal(found[0], others) for others in found)
    assert all(row == rows[0] for row in rows)
    assert (len(rows[0]) > 0) == (attention == "nsa")


def test_nothing_is_computed_twice_without_gradients():
    runs = []
    for policy in ("full", ""):
        model = make_loss("dense", policy).model
        with Count() as count, torch.no_grad():
            model(torch.arange(20))
            model(torch.arange(20), cache=model.new_cache(max_tokens=20))
        runs.append(count.of(torch.ops.aten.mm.default))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (("full", 1), "first must be left at 0 with policy full, got 1"),
        (("range", 0, 12), r"checkpointing\.last must be below model\.num_layers \(1\), got 12"),
        (
            ("operators",),
            r"checkpointing\.policy must not be operators with attention nsa on a CPU",
        ),
    ],
)
def test_bad_policies_are_refused(tmp_path, policy, message):
    with pytest.raises(ValueError, match=message):
        new_trainer(tmp_path, checkpointing=CheckpointingConfig(*policy))


def test_kept_bytes_of_a_layer():
    config = LMConfig()
    assert kept_bytes(config, "input") == {"input": 4 * 768}
    kept = kept_bytes(config, "attention")
    assert sum(kept.values()) == 9616  # measured once
    pattern = NSAConfig(branches=("slc", "win"))
    kept = kept_bytes(dataclasses.replace(config, nsa=pattern), "attention")
    pattern = dataclasses.replace(pattern, scores="token_max")
    by_token = kept_bytes(dataclasses.replace(config, nsa=pattern), "attention")
    assert kept == {**by_token, "lse_cmp": 4 * 12}
    kept = kept_bytes(dataclasses.replace(config, attention="dense"), "attention", 4)
    assert kept == {"input": 3072, "out": 3072, "lse": 48}
