"""Statistics of gates and selections: equal to a slow count of what the layers used."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import BRANCHES
from nsa.lm.model import LanguageModel
from nsa.module import GateLinear, NativeSparseAttention
from nsa.train.telemetry.layer_statistics import LayerStatistics
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import MODEL, PATTERN, make_trainer, tiny_config
from tests.train.runs.test_inspection import model_of

SIZE = PATTERN.block_size
LENGTHS = (0, 70, 1, 25)
CU = torch.tensor([0, 0, 70, 71, 96], dtype=torch.int32)
TOKENS = torch.randint(256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def observe(model: LanguageModel) -> dict[str, float]:
    """Statistics of one forward pass; those before and after it do not count."""
    layers = LayerStatistics(model)
    model.hidden_states(TOKENS, CU, max(LENGTHS))
    layers.start()
    model.hidden_states(TOKENS, CU, max(LENGTHS))
    layers.stop(lambda sums: sums, lambda sums: sums)
    model.hidden_states(TOKENS, CU, max(LENGTHS))
    row = layers.row()
    assert layers.row() == {}
    return row


def slow_count(gates: Tensor, blocks: Tensor | None, columns: list[int]) -> dict[str, float]:
    """Metrics of a layer from the gates and blocks that it used."""
    active = gates[..., columns].double()
    share = active / active.sum(-1, keepdim=True)
    entropy = -(share * share.log()).sum(-1) / torch.tensor(len(columns)).log()
    found = {"gate_entropy": float(entropy.mean()), "gate_win_mean": float(active[..., -1].mean())}
    if blocks is None:
        return found
    queries, distances, shares, both, full = 0, list[int](), 0, 0, list[int]()
    for start, stop in itertools.pairwise(CU.tolist()):
        for t, head in itertools.product(range(stop - start), range(blocks.shape[1])):
            ids = {int(i) for i in blocks[start + t, head] if i >= 0}
            keys = [key for key in range(t + 1) if key // SIZE in ids]
            queries += bool(ids)
            distances += [t - key for key in keys]
            if t + 1 >= blocks.shape[-1] * SIZE:
                full.append(len(keys))
            if t > 0:
                shares += len(ids)
                both += len(ids & {int(i) for i in blocks[start + t - 1, head]})
    return {
        **found,
        "selected_tokens": len(distances) / queries,
        "selected_distance_tokens": sum(distances) / len(distances),
        "selected_overlap": both / shares,
        "selected_min_tokens": min(full),
        "selected_max_tokens": max(full),
        "selected_reference_calls": 1,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2},
        {"compress_rope": "none", "branches": ("slc", "win")},
        {"phi": "mlp", "gate": "softmax"},
        {"share_kv": True, "num_selected_blocks_table": ((0, 70, 3),), "scores": "token_max"},
    ],
)
def test_statistics_are_those_of_a_slow_count(changes):
    model, used = model_of(**changes), list[tuple[Tensor, Tensor | None]]()
    for layer in model.decoder_layers():
        assert isinstance(layer.attention, NativeSparseAttention)
        layer.attention.observer = lambda given, blocks: used.append((given.gates.detach(), blocks))
    row = observe(model)
    branches = model.config.nsa.branches
    columns = [BRANCHES.index(branch) for branch in branches]
    counts = [slow_count(*each, columns) for each in used[:2]]
    for number, expected in enumerate(counts):
        for name, value in expected.items():
            assert row[f"{name}_layer_{number}"] == pytest.approx(value, rel=1e-6), name
    ways: dict[str, Any] = {"selected_min_tokens": min, "selected_max_tokens": max}
    ways["selected_reference_calls"] = sum
    for name in counts[0]:
        combined = ways.get(name, statistics.fmean)([each[name] for each in counts])
        assert row[name] == pytest.approx(combined, rel=1e-6), name
    assert ("gate_cmp_mean" in row) == ("cmp" in branches)


def test_layers_that_collapsed():
    model = model_of(gate="sigmoid")
    biases = []
    for layer in model.decoder_layers():
        last = layer.attention.get_submodule("gate.net")
        assert isinstance(last, GateLinear)
        torch.nn.init.zeros_(last.weight)
        biases.append(torch.nn.init.zeros_(last.bias).detach().view(-1, 3))
    biases[0][:] = torch.tensor([1.0, 0.0, -6.0])
    names = ("gate_collapsed_layer_0", "gate_collapsed_layer_1", "gate_collapsed")
    row = observe(model)
    assert [row[name] for name in names] == [1, 1, 1]
    biases[0][:, 2] = -2.0
    row = observe(model)
    assert [row[name] for name in names] == [0, 1, 0.5]


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "dense"},
        {"nsa": dataclasses.replace(PATTERN, branches=("win",))},
        {"nsa": dataclasses.replace(PATTERN, branches=("cmp", "win"), gate="fixed")},
    ],
)
def test_models_without_statistics(changes):
    assert observe(LanguageModel(dataclasses.replace(MODEL, **changes))) == {}


@pytest.mark.parametrize("telemetry", [True, False])
def test_rows_record_them_unless_switched_off(tmp_path, telemetry):
    config = tiny_config(tmp_path, steps=4, eval_every=3, telemetry=telemetry)
    make_trainer(config, tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 3, 4]
    for row in rows:
        names = [name for name in row if name.startswith(("gate_", "selected_"))]
        assert bool(names) == telemetry
        if telemetry:
            # one layer, two micro-batches: the step of the row and no other
            assert row["selected_reference_calls"] == 2
            assert 0 < float(row["selected_tokens_layer_0"]) == float(row["selected_tokens"]) <= 64
