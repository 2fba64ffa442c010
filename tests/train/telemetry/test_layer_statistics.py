"""What rows say about gates and choices: equal to what a slow count finds, and to what the layers really did."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nsa
from nsa import NativeSparseAttention
from nsa.attention import AttentionInputs, attend
from nsa.config import BRANCHES
from nsa.errors import UserError
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.ops._operator import Call
from nsa.ops.attention import AttentionResult, BranchInputs, run_attention
from nsa.train.telemetry.layer_statistics import LayerStatistics
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import MODEL, PATTERN, make_trainer, tiny_config

LENGTHS = (0, 70, 1, 25)
CU = torch.tensor([0, 0, 70, 71, 96], dtype=torch.int32)


def run(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, float], list[Tensor], list[Tensor]]:
    """Statistics of one forward pass, with the choices and the gates of its layers."""
    chosen: list[Tensor] = []

    def note(inputs: BranchInputs, call: Call, backend: str) -> AttentionResult:
        result = run_attention(inputs, call, backend)
        if result.block_indices is not None:
            chosen.append(result.block_indices)
        return result

    gates: list[Tensor] = []

    def note_gates(inputs: AttentionInputs, *args: Any, **options: Any) -> Tensor:
        gates.append(inputs.gates.detach())
        return attend(inputs, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr("nsa.attention.run_attention", note)
        patched.setattr("nsa.module.attend", note_gates)
        tokens = torch.randint(256, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
        statistics = LayerStatistics(model)
        model.hidden_states(tokens, CU, max(LENGTHS))  # not counted, nor is the last one
        statistics.start()
        model.hidden_states(tokens, CU, max(LENGTHS))
        statistics.stop(lambda sums: sums, lambda sums: sums)
        model.hidden_states(tokens, CU, max(LENGTHS))
    row = statistics.row()
    assert statistics.row() == {}
    return row, chosen[: len(chosen) // 3], gates[: len(gates) // 3]


def observe(model: LanguageModel) -> dict[str, float]:
    statistics = LayerStatistics(model)
    statistics.start()
    model.hidden_states(torch.arange(sum(LENGTHS)), CU, max(LENGTHS))
    statistics.stop(lambda sums: sums, lambda sums: sums)
    return statistics.row()


CHOICE = (
    "selected_tokens",
    "selected_distance_tokens",
    "selected_overlap",
    "selected_min_tokens",
    "selected_max_tokens",
)


def slow_choice(blocks: Tensor, size: int) -> tuple[float, float, float, float, float]:
    """Keys a query, their mean distance, share of blocks that the query before chose too; fewest and most keys of a query."""
    queries, distances, shares, both, full = 0, [], 0, 0, []
    start = 0
    for length in LENGTHS:
        for t in range(length):
            for head in range(blocks.shape[1]):
                ids = {int(i) for i in blocks[start + t, head] if i >= 0}
                queries += bool(ids)
                if t + 1 >= blocks.shape[-1] * size:
                    full.append(
                        sum(key <= t for i in ids for key in range(i * size, (i + 1) * size))
                    )
                distances += [
                    t - key for i in ids for key in range(i * size, (i + 1) * size) if key <= t
                ]
                if t > 0:
                    shares += len(ids)
                    both += len(ids & {int(i) for i in blocks[start + t - 1, head]})
        start += length
    assert len(full) > 1
    return (
        len(distances) / queries,
        sum(distances) / len(distances),
        both / shares,
        min(full),
        max(full),
    )


def model_of(**changes: Any) -> LanguageModel:
    torch.manual_seed(1)
    pattern = dataclasses.replace(PATTERN, **changes)
    model = LanguageModel(dataclasses.replace(MODEL, num_layers=2, nsa=pattern))
    for parameter in model.parameters():  # larger than at the start, so that choices differ
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    return model


@pytest.mark.parametrize("changes", [
    {}, {"num_kv_heads": 2}, {"compress_rope": "none", "branches": ("slc", "win")}, {"phi": "mlp", "gate": "softmax"},
    {"share_kv": True, "num_selected_blocks_table": ((0, 70, 3),)},
])  # fmt: skip
def test_statistics_are_those_of_what_the_layers_did(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(**changes)
    row, chosen, gates = run(model, monkeypatch)
    for layer, (blocks, values) in enumerate(zip(chosen, gates, strict=True)):
        expected = dict(zip(CHOICE, slow_choice(blocks, 16), strict=True))
        active = values[
            ...,
            [
                column
                for column, branch in enumerate(BRANCHES)
                if branch in model.config.nsa.branches
            ],
        ].double()
        share = active / active.sum(-1, keepdim=True)
        expected["gate_entropy"] = float(
            (-(share * share.log()).sum(-1)).mean() / torch.tensor(active.shape[-1]).log()
        )
        expected["gate_win_mean"] = float(values[..., 2].double().mean())
        for name, value in expected.items():
            assert row[f"{name}_layer_{layer}"] == pytest.approx(value, rel=1e-6), name
        assert row[f"selected_reference_calls_layer_{layer}"] == 1
    for name in ("selected_tokens", "gate_slc_mean"):
        assert row[name] == pytest.approx((row[f"{name}_layer_0"] + row[f"{name}_layer_1"]) / 2)
    for name, extreme in (("selected_min_tokens", min), ("selected_max_tokens", max)):
        assert row[name] == extreme(row[f"{name}_layer_0"], row[f"{name}_layer_1"])
    assert row["selected_reference_calls"] == 2
    assert ("gate_cmp_mean" in row) == ("cmp" in model.config.nsa.branches)


def test_layers_that_collapsed() -> None:
    model = model_of(gate="sigmoid")
    biases = []
    for layer in model.decoder_layers():
        last = layer.attention.get_submodule("gate.net")
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.zeros_(last.weight)
        biases.append(torch.nn.init.zeros_(last.bias).detach().view(-1, 3))
    biases[0][:] = torch.tensor([1.0, 0.0, -6.0])
    row = observe(model)
    assert (
        row["gate_collapsed_layer_0"],
        row["gate_collapsed_layer_1"],
        row["gate_collapsed"],
    ) == (1, 1, 1)
    biases[0][:, 2] = -2.0
    row = observe(model)
    assert (
        row["gate_collapsed_layer_0"],
        row["gate_collapsed_layer_1"],
        row["gate_collapsed"],
    ) == (0, 1, 0.5)


@pytest.mark.parametrize("config", [
    dataclasses.replace(MODEL, attention="dense"),
    dataclasses.replace(MODEL, nsa=dataclasses.replace(PATTERN, branches=("win",))),
    dataclasses.replace(MODEL, nsa=dataclasses.replace(PATTERN, branches=("cmp", "win"), gate="fixed")),
])  # fmt: skip
def test_nothing_to_tell(config: LMConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(LanguageModel(config), monkeypatch)[0] == {}


@pytest.mark.parametrize("rope", ["middle", "start", "none"])
def test_choice_of_a_dense_batch(rope: Any) -> None:
    config = dataclasses.replace(PATTERN, compress_rope=rope)
    module = NativeSparseAttention(32, config)
    x = torch.randn(2, 90, 32, generator=torch.Generator().manual_seed(2))
    blocks = module.choose_blocks(x)
    assert blocks.shape == (180, 1, 4)
    assert torch.equal(blocks[90:], module.choose_blocks(x[1]))
    nsa.check_inputs(
        config, cu_seqlens_q=torch.tensor([0, 90, 180], dtype=torch.int32), block_indices=blocks
    )


def test_no_choice_without_the_branch() -> None:
    module = NativeSparseAttention(32, dataclasses.replace(PATTERN, branches=("win",)))
    with pytest.raises(UserError, match=r"choose_blocks: config\.branches must have slc"):
        module.choose_blocks(torch.zeros(4, 32))


def test_rows_record_them(tmp_path: Path) -> None:
    make_trainer(tiny_config(tmp_path, steps=4, eval_every=3), tmp_path / "run").run()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 3, 4]
    for row in rows:
        # one layer, two micro-batches: the step of the row and no other
        assert row["selected_reference_calls"] == 2
        assert 0 < float(row["selected_tokens_layer_0"]) == float(row["selected_tokens"]) <= 64
        assert 0 < float(row["selected_overlap"]) <= 1
        assert 0 < float(row["gate_slc_mean_layer_0"]) < 1


def test_the_switch(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(tmp_path, steps=2, telemetry=False), tmp_path / "run")
    assert trainer.model.decoder_layers()[0].attention.sums is None
    trainer.run()
    assert not [
        name
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        for name in row
        if "selected" in name
    ]


class Checkpointed(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=False)


def test_compiled_and_checkpointed_layers_count_as_well() -> None:
    """One graph serves steps that count and steps that do not."""
    model = LanguageModel(dataclasses.replace(MODEL, num_layers=1))
    expected, statistics = observe(model), LayerStatistics(model)
    model.layers = torch.nn.ModuleList([Checkpointed(model.layers[0])])
    compiled = torch.compile(model.hidden_states, fullgraph=True, backend="aot_eager")
    tokens = torch.arange(sum(LENGTHS))
    for _ in range(2):
        compiled(tokens, CU, max(LENGTHS)).sum().backward()  # not counted
        statistics.start()
        compiled(tokens, CU, max(LENGTHS)).sum().backward()
        statistics.stop(lambda sums: sums, lambda sums: sums)
        found = statistics.row()
        for name, value in expected.items():
            assert "calls" in name or found[name] == pytest.approx(value, rel=1e-5), name
