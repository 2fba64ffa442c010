"""Inspection: what the layers did, counted slowly; and the layers do the same as ever."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NativeSparseAttention
from nsa.config import BRANCHES, NSAConfig
from nsa.lm import inspection
from nsa.lm.inspection import (
    HISTOGRAM_BINS,
    MAP_SIZE,
    QUANTILES,
    SelectionFigures,
    gate_figures,
    inspect_text,
    observed,
    selected_ranges,
    selection_figures,
)
from nsa.lm.model import LanguageModel
from nsa.train.telemetry.layer_statistics import LayerStatistics
from tests.train.cases import MODEL, PATTERN

TEXT = torch.randint(256, (150,), generator=torch.Generator().manual_seed(0)).tolist()


def model_of(**changes: Any) -> LanguageModel:
    torch.manual_seed(1)
    pattern = dataclasses.replace(PATTERN, **changes)
    model = LanguageModel(dataclasses.replace(MODEL, num_layers=2, nsa=pattern))
    for parameter in model.parameters():  # larger than at the start, so that selections differ
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    return model


def noted(model: LanguageModel) -> list[tuple[int, NSAConfig, Tensor, Tensor | None]]:
    found = []
    with observed(model, lambda *given: found.append(given)), torch.no_grad():
        model(torch.tensor(TEXT))
    return found


def random_blocks(num_tokens: int, heads: int, width: int, size: int, seed: int = 0) -> Tensor:
    """Blocks up to the query's own, its own among them, -1 at the end where there are fewer."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.full((num_tokens, heads, width), -1, dtype=torch.int32)
    for t, head in itertools.product(range(num_tokens), range(heads)):
        others = torch.randperm(t // size, generator=generator)[: width - 1].tolist()
        ids = sorted({t // size, *others})
        blocks[t, head, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return blocks


# --- what is observed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 2},
        {"branches": ("slc", "win"), "compress_rope": "none"},
        {"branches": ("cmp", "win"), "gate": "softmax"},
        {"gate": "fixed", "share_kv": True},
    ],
)
def test_gates_and_blocks_are_those_that_the_layers_computed(changes: dict[str, Any]) -> None:
    model = model_of(**changes)
    inputs = list[Tensor]()
    for layer in model.decoder_layers():
        layer.attention.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    before = model(torch.tensor(TEXT))
    inputs.clear()
    found = noted(model)
    assert [layer for layer, *_ in found] == [0, 1]
    for x, layer, (_, config, gates, blocks) in zip(
        inputs, model.decoder_layers(), found, strict=True
    ):
        attention = layer.attention
        assert isinstance(attention, NativeSparseAttention)
        assert config == attention.config
        torch.testing.assert_close(gates, attention.gate(x), rtol=1e-5, atol=1e-6)
        assert (blocks is None) == ("slc" not in config.branches)
        if blocks is not None:
            assert torch.equal(blocks, attention.choose_blocks(x))
        assert attention.observer is None
    assert torch.equal(model(torch.tensor(TEXT)), before)
    assert len(found) == 2, "noted after the end"


def test_a_dense_model_has_nothing_to_observe() -> None:
    model = LanguageModel(dataclasses.replace(MODEL, attention="dense"))
    assert inspect_text(model, TEXT) == []


def test_figures_agree_with_the_telemetry_of_training() -> None:
    model = model_of(num_kv_heads=2).train()
    layers = inspect_text(model, TEXT)
    assert model.training
    statistics = LayerStatistics(model)
    statistics.start()
    model.hidden_states(torch.tensor(TEXT))
    statistics.stop(lambda sums: sums, lambda sums: sums)
    row = statistics.row()
    for layer in layers:
        selection = layer.selection
        assert selection is not None
        figures = {
            "selected_tokens": selection.keys_mean,
            "selected_distance_tokens": selection.distance_mean,
            "selected_overlap": selection.overlap[1],
            **{f"gate_{name}_mean": gates.mean for name, gates in layer.gates.items()},
        }
        for name, value in figures.items():
            assert value == pytest.approx(row[f"{name}_layer_{layer.layer}"], rel=1e-5), name


# --- figures, counted slowly ----------------------------------------------------------------------


@pytest.mark.parametrize("at_a_time", [7, 1 << 14])
def test_figures_of_blocks(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_QUERIES_AT_A_TIME", at_a_time)
    config = dataclasses.replace(PATTERN, num_kv_heads=2)
    num_tokens, size = 330, config.block_size
    blocks = random_blocks(num_tokens, 2, 4, size)
    found = selection_figures(blocks, config, first_query=40)
    assert isinstance(found, SelectionFigures)
    positions = torch.arange(num_tokens)[:, None, None] // size
    back = ((positions - blocks) * size)[blocks >= 0].tolist()
    assert found.distance_tokens == [0, 16, 32, 64, 128, 256]
    bins = [*found.distance_tokens, 10**9]
    assert found.distance_counts == [
        sum(low <= tokens < high for tokens in back) for low, high in itertools.pairwise(bins)
    ]
    lag = 8
    both = [{*now.tolist()} & {*then.tolist()} - {-1} for now, then in pairs(blocks, lag)]
    total = sum(int((now >= 0).sum()) for now, _ in pairs(blocks, lag))
    assert found.overlap[lag] == pytest.approx(sum(map(len, both)) / total)
    assert list(found.overlap) == [1, 2, 4, 8, 16, 32, 64]


def pairs(blocks: Tensor, lag: int) -> list[tuple[Tensor, Tensor]]:
    """Blocks of each query and KV head, and those of the query ``lag`` tokens before."""
    return list(zip(blocks[lag:].flatten(0, 1), blocks[:-lag].flatten(0, 1), strict=True))


def test_heat_map_is_the_share_of_blocks_and_queries() -> None:
    config = dataclasses.replace(PATTERN, num_kv_heads=2)
    num_tokens, size, first = 330, 16, 40
    blocks = random_blocks(num_tokens, 2, 4, size)
    found = selection_figures(blocks, config, first_query=first).heat_map
    queries, columns = num_tokens - first, -(-num_tokens // size)
    assert found.shape == (MAP_SIZE, columns)
    hits, all_of = torch.zeros(found.shape), torch.zeros(found.shape)
    for t in range(first, num_tokens):
        row = (t - first) * MAP_SIZE // queries
        for block, head in itertools.product(range(columns), range(2)):
            hits[row, block] += bool((blocks[t, head] == block).any())
            all_of[row, block] += 1
    torch.testing.assert_close(found, hits / all_of)
    # With more blocks than columns, a column is several of them.
    many = random_blocks(16 * 300, 1, 4, size, seed=1)
    wide = selection_figures(many, PATTERN, first_query=16 * 300 - 1).heat_map
    assert wide.shape == (1, MAP_SIZE)
    chosen = [int(i) * MAP_SIZE // 300 for i in many[-1, 0]]
    sizes = [sum(i * MAP_SIZE // 300 == column for i in range(300)) for column in range(MAP_SIZE)]
    expected = [chosen.count(column) / sizes[column] for column in range(MAP_SIZE)]
    assert wide[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17])
def test_short_texts(num_tokens: int) -> None:
    (layer, _) = inspect_text(model_of(), TEXT[:num_tokens], queries=[num_tokens - 1])
    selection = layer.selection
    assert selection is not None
    assert selection.ranges == {num_tokens - 1: [[(0, num_tokens)]]}
    assert selection.keys_mean == (num_tokens + 1) / 2
    assert sum(selection.distance_counts) == num_tokens + (num_tokens > 16)
    assert list(selection.overlap) == [lag for lag in (1, 2, 4, 8, 16) if lag < num_tokens]
    assert selection.heat_map.shape == (num_tokens, -(-num_tokens // 16))


def test_ranges_hold_the_keys_of_the_blocks() -> None:
    config = dataclasses.replace(PATTERN, num_kv_heads=2)
    blocks = random_blocks(200, 2, 4, 16)
    queries = [0, 15, 16, 100, 199]
    found = selected_ranges(blocks, config, queries)
    assert list(found) == queries
    for query, head in itertools.product(queries, range(2)):
        keys = {t for i in blocks[query, head] for t in range(int(i) * 16, int(i) * 16 + 16)}
        expected = {t for t in keys if 0 <= t <= query}
        ranges = found[query][head]
        assert {t for start, end in ranges for t in range(start, end)} == expected
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "adjacent ones are merged"
    assert selected_ranges(blocks, config, []) == {}


def test_figures_of_gates() -> None:
    config = dataclasses.replace(PATTERN, branches=("cmp", "win"))
    gates = torch.rand(101, 2, 3, generator=torch.Generator().manual_seed(0))
    gates[:, 1, 0] = 1.0
    found = gate_figures(gates, config)
    assert list(found) == ["cmp", "win"]
    for name, figures in found.items():
        values = gates[..., BRANCHES.index(name)]
        assert figures.mean == pytest.approx(float(values.mean()))
        assert figures.head_means == pytest.approx(values.mean(0).tolist())
        nearest = values.flatten().quantile(torch.tensor(QUANTILES), interpolation="nearest")
        assert figures.quantiles == pytest.approx(nearest.tolist())
        counts = [0] * HISTOGRAM_BINS
        for value in values.flatten().tolist():
            counts[min(int(value * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += 1
        assert figures.histogram == pytest.approx([count / 202 for count in counts])
    assert found["cmp"].quantiles[-1] == 1.0
