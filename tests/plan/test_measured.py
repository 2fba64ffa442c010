"""Planned beside measured memory: every peak that is on record is met within 15%."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from nsa.bench.cases import parse_shape
from nsa.bench.rows import newest_rows, read_rows
from nsa.cli.bench import carried_rows
from nsa.lm.config import LMConfig
from nsa.plan.measure import WITHIN
from nsa.plan.memory import attention_backward_bytes, step_memory
from nsa.train.config import TrainConfig
from nsa.train.execution.activations import kept_bytes
from nsa.train.load import load_config
from tests.bench.test_documented_figures import ROOT

MIB = 2**20
BENCHMARKS = ROOT / "benchmarks"


class Peak(NamedTuple):
    """A measured peak of tensors, and the run that it was measured in."""

    source: str
    mib: float
    config: str
    settings: Mapping[str, Any] = MappingProxyType({})


def of_acceptance_rows() -> Iterator[Peak]:
    """Configurations as they ship, on one GPU."""
    for path in sorted((BENCHMARKS / "acceptance").glob("*.jsonl")):
        for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if row["peak_mib"]:
                config = "gpu-small" if row["config"] == "make train" else row["config"]
                yield Peak(f"acceptance run, {path.stem}", row["peak_mib"], config)


def of_training_rows() -> Iterator[Peak]:
    """Dense and NSA, compiled or not, with and without CUDA graphs, policies of checkpointing."""
    files = ("memory/h200", "switches/h200", "results/h200-train", "results/h200-shipped")
    for row in read_rows([BENCHMARKS / f"{name}.jsonl" for name in files]):
        if row.mode == "fwd_bwd" and row.peak_mib and row.settings:
            same = ("micro_batch", "accumulation", "compile", "cuda_graphs", "loss_chunk")
            words = {name: row.settings[name] for name in same}
            words["model.mlp_hidden_size"] = row.settings["mlp_hidden_size"]
            words["checkpointing.policy"] = row.settings["checkpointing"]
            words["data.document_mask"] = row.is_masked
            words |= {"seq_len": row.seq_len, "global_batch": row.batch}
            config = "78m" if row.settings["attention"] == "nsa" else "78m-dense"
            yield Peak(f"{row.provider}, {row.commit}", row.peak_mib, config, words)


def of_scaling_rows() -> Iterator[Peak]:
    """One to four processes, DDP and FSDP2; rows with CUDA graphs leave the graphs' memory out."""
    lines = (BENCHMARKS / "scaling/h200.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):
        if not row["cuda_graphs"]:
            same = ("micro_batch", "accumulation", "global_batch", "compile", "cuda_graphs")
            words = {name: row[name] for name in same}
            for name in ("strategy", "gradient_compression", "gather_dtype"):
                words[f"parallel.{name}"] = row[name]
            words |= {"world_size": row["processes"], "data.document_mask": False}
            yield Peak(f"{row['strategy']} {row['commit']}", row["peak_mib"], row["config"], words)


def test_the_plan_is_near_every_measured_peak():
    training, scaling = list(of_training_rows()), list(of_scaling_rows())
    shipped = list(of_acceptance_rows())
    assert len(training) >= 20
    assert {"78m", "117m", "gpu-small", "gpu-small-dense"} <= {peak.config for peak in shipped}
    assert {peak.settings["parallel.strategy"] for peak in scaling} == {"ddp", "fsdp"}
    for peak in (*shipped, *training, *scaling):
        words = {name: str(value) for name, value in peak.settings.items()}
        planned = step_memory(load_config(peak.config, words)).peak / MIB
        assert planned == pytest.approx(peak.mib, rel=WITHIN), peak


def test_attention_needs_what_was_measured():
    """Forward and backward of the operators, in bytes above their inputs."""
    providers: dict[str, Any] = {"nsa": "nsa", "dense-cudnn": "dense"}
    rows = [row for row in newest_rows(read_rows(carried_rows("results"))) if row.peak_mib]
    # Shorter sequences need less: no rows of dq.
    rows = [row for row in rows if row.provider in providers and row.seq_len >= 8192]
    rows = [row for row in rows if (row.case, row.mode) == ("attention", "fwd_bwd")]
    assert len(rows) >= 20
    for row in rows:
        model = LMConfig(nsa=parse_shape(row.shape).config(), attention=providers[row.provider])
        kept = kept_bytes(model, "attention")
        needed = attention_backward_bytes(TrainConfig(model=model)) + sum(kept.values())
        needed -= kept["input"] + kept["out"]  # the gradient of out is an input here
        peak = row.batch * row.seq_len * needed / MIB
        assert peak == pytest.approx(row.peak_mib, rel=WITHIN), (row.shape, row.provider)
