"""`nsa plan`: what a run is, what it needs, how long it takes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from nsa import cli
from nsa.bench.rows import Row
from nsa.bench.train import differences
from nsa.errors import UserError
from nsa.plan import measure
from nsa.plan import plan as planning
from nsa.plan.gpus import KNOWN, Gpu, find_gpu
from nsa.plan.plan import ASSUMED_MFU, alternatives, expected_speed, make_plan, suggestion
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.load import load_config
from nsa.train.telemetry.throughput import peak_of
from tests.bench.rows import make_row, write_rows
from tests.bench.test_documented_figures import ROOT
from tests.bench.test_train import write_config

H200 = KNOWN["h200"]
PARAMETERS = 78_601_392


def seed(**changes: Any) -> TrainConfig:
    return replace(load_config("78m"), **changes)


# ---------------------------------------------------------------------------------- time and cost


def step(**values: Any) -> Row:
    """A measured training step of the seed configuration's model on an H200."""
    settings = {
        "attention": "nsa",
        "parameters": PARAMETERS,
        "micro_batch": 32,
        "compile": True,
        "cuda_graphs": True,
        "checkpointing": "none",
        **values.pop("settings", {}),
    }
    given = {"case": "train", "mode": "fwd_bwd", "gpu": H200.name, "tokens_per_s": 400e3}
    return make_row(**{**given, "mfu": 0.4, **values}, settings=settings)


def speed(rows: list[Row], mfu: float | None = None, **changes: Any) -> planning.Speed:
    config = seed(micro_batch=32, accumulation=1, global_batch=32, **changes)
    found = expected_speed(config, PARAMETERS, 0.5e9, H200, rows, mfu)
    assert found is not None
    return found


def test_a_measured_speed_counts_first():
    rows = [step(settings={"micro_batch": 2}, tokens_per_s=250e3), step()]
    how = "measured: seed, nsa, S 2,048 x 32, compiled, checkpointing none, 2026-01-02"
    assert speed(rows) == planning.Speed(400e3, how)
    assert speed(rows, mfu=0.1).why == "MFU 0.10, given"


FULL = {"checkpointing": "full", "micro_batch": 2}


@pytest.mark.parametrize(
    ("other", "changes", "wanted"),
    [
        ({"date": "2026-02-01T00:00:00+00:00"}, {}, 300e3),
        ({"settings": {"document_mask": True}}, {}, 300e3),  # the run's documents are masked, too
        ({"settings": {"compile": False}}, {}, 400e3),
        ({"settings": {"cuda_graphs": False}}, {"cuda_graphs": False}, 300e3),
        ({"settings": FULL}, {}, 400e3),
        ({"settings": FULL}, {"checkpointing": CheckpointingConfig("full")}, 300e3),
    ],
    ids=str,
)
def test_the_row_that_is_most_like_the_run(other, changes, wanted):
    rows = [step(), step(**other, tokens_per_s=300e3)]
    for given in (rows, rows[::-1]):
        assert speed(given, **changes).tokens_per_s == wanted


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA A100"},
        {"mode": "fwd"},
        {"dtype": "float32"},
        {"case": "attention"},
        {"settings": {"attention": "dense"}},
    ],
    ids=str,
)
def test_what_is_not_comparable_does_not_count(other):
    found = speed([step(**other)])
    assert found.why == f"MFU {ASSUMED_MFU:.2f}, assumed, nothing like it was measured"


def test_the_mfu_of_another_model_or_length():
    long = step(seq_len=65_536, mfu=0.3)
    found = speed([long, step(settings={"parameters": 1}, mfu=0.2)])
    assert found.tokens_per_s == pytest.approx(0.2 * 989.4e12 / 0.5e9)
    assert found.why.startswith("MFU 0.20, as of seed, nsa, S 2,048 x 32")
    assert speed([long]).why.startswith("MFU 0.30, as of")


def test_time_and_operations():
    config = seed(eval_windows=60, eval_every=1000, world_size=2, global_batch=8)
    plan = make_plan(config, H200, [step()])
    assert plan.tokens == 50_000 * 8 * 2048
    seconds = (plan.tokens + 51 * 60 * 2048 / 3) / 800e3
    assert (plan.seconds, plan.gpu_hours) == pytest.approx((seconds, seconds / 1800))
    assert make_plan(config, find_gpu(None, 10.0)).gpu_hours is None
    assert make_plan(seed(compute_dtype="fp32"), H200).speed is None  # the peak is that of bf16
    # 6 operations a parameter in a product; 12 layers, 12 heads of 128 elements, 6 for each key.
    dense = make_plan(load_config("78m-dense"), None)
    in_products = 256 * 768 + 12 * (768 * 1024 + 768 * 768 + 2 * 768 * 3072)
    attended = 6 * 12 * 12 * 128 * 1024.5
    assert dense.flops_per_token == pytest.approx(6 * in_products + attended)


# ------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("key", "spellings"),
    [
        ("b200", "B200, b200-sxm6-180gb"),
        ("h200", "h-200, H 200, h200sxm, h200-sxm, H200 SXM5 141GB, nvidia_h200, H200 141 GB"),
        ("h100", "H100, H100 SXM5, h100-80g"),
        ("h100-pcie", "h100pcie, H100 PCIe, h100_pcie, PCIe H100 80GB"),
        ("h100-nvl", "H100-NVL"),
        ("a100", "A100, a100-80gb"),
        ("a100-40", "A100 40GB"),
        ("a100-pcie", "a100 pcie"),
        ("a100-pcie-40", "A100 PCIe 40"),
        ("l40s", "L40S"),
        ("rtx4090", "4090, RTX 4090, geforce-rtx-4090"),
    ],
)
def test_a_gpu_may_be_spelled_in_any_way(key, spellings):
    for spelling in [*spellings.split(", "), key, KNOWN[key].name]:
        assert find_gpu(spelling, None) == KNOWN[key], spelling
    assert peak_of(KNOWN[key].name)


@pytest.mark.parametrize(
    "other",
    ["GB200", "H200 NVL", "RTX 3090", "H100 PCIe NVL", "CPU H200", "", "40GB"],
)
def test_another_gpu_is_not_taken_for_a_known_one(other):
    with pytest.raises(UserError, match="For another one give --memory-gib alone"):
        find_gpu(other, None)


def test_a_cpu(capsys):
    """What a step holds beside the model's state is not known there."""
    words = ["plan", "cpu-small", "--gpu", "cpu", "--optim.name", "adamw"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory_bytes"]["peak"] == 16 * 990_384  # its parameters
    assert cli.main([*words, "--memory-gib", "0.5"]) == 2
    said = capsys.readouterr()
    assert "at least 1.02 GiB for each process" in said.out
    assert "the run must fit into the 0.5 GiB of CPU, got 1.0 GiB" in said.err


# ------------------------------------------------------------------------------------------ memory


def test_a_run_that_does_not_fit_is_refused_with_a_way_out():
    config = seed(micro_batch=32, accumulation=1, global_batch=32)
    why = r"must fit into the 24.0 GiB of NVIDIA H200, got 26.. GiB. It takes 14.. GiB with "
    with pytest.raises(UserError, match=why + "--micro-batch 16 --accumulation 2"):
        planning.refuse_what_does_not_fit(make_plan(config, find_gpu("h200", 24.0)))
    planning.refuse_what_does_not_fit(make_plan(config, H200))
    planning.refuse_what_does_not_fit(make_plan(config, None))
    assert suggestion(config, Gpu("a GPU", 1.0)).startswith("Nothing that trains the same")


def test_changes_that_need_less_train_the_same():
    model = replace(seed().model, vocab_size=50_257)
    large = seed(model=model, cuda_graphs=False, micro_batch=6, accumulation=1, global_batch=6)
    pieces = {"loss_chunk": 1024}
    single = {"micro_batch": 1, "accumulation": 6, **pieces}
    full = {**single, "checkpointing.policy": "full"}
    assert [differences(large, config) for config in alternatives(large)] == [
        pieces,
        {"micro_batch": 3, "accumulation": 2, **pieces},
        single,
        {**single, "checkpointing.policy": "operators"},
        full,
        {**full, "accumulation": 3, "world_size": 2, "parallel.strategy": "fsdp"},
    ]
    several = alternatives(replace(large, world_size=2, global_batch=12))
    assert [config.world_size for config in several][-2:] == [2, 4]


# ------------------------------------------------------------------------------------- the command


def test_the_command(tmp_path, capsys):
    words = ["plan", "78m", "--gpu", "h100", "--price-per-gpu-hour", "2", "--rows", str(tmp_path)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("78m, on 1 x NVIDIA H100 80GB HBM3 of 79.2 GiB\n")
    for line in (
        "tokens      409,600,000 = 50,000 steps x 4 windows x 2,048",
        "saved for backward: attention",
        "time        0:",
        "GPU hours x 2",
    ):
        assert line in said
    write_rows(tmp_path / "rows.jsonl", [step(gpu=KNOWN["h100"].name, tokens_per_s=1e6)])
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_s"] == 1e6
    assert found["cost"] == pytest.approx(found["seconds"] / 1800)
    sizes = found["memory_bytes"]
    assert 2 * sizes["peak"] == sum(sizes.values()) - sizes["needed"]


def test_committed_rows_give_the_speed(capsys):
    words = ["plan", "78m", "--gpu", "h200", "--json", "--checkpointing.policy", "full"]
    results = str(ROOT / "benchmarks/results")
    for given, policy in (([], "full"), (["--rows", results], "none")):
        assert cli.main([*words, *given]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["speed_from"].startswith("measured: seed, nsa, S 2,048")
        assert f"checkpointing {policy}" in found["speed_from"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--rows nowhere", "--rows must be a file or folder of rows that exists, got nowhere"),
        ("--mfu 2", "--mfu must be at most 1"),
        ("--price-per-gpu-hour 0", "--price-per-gpu-hour must be positive"),
        ("--memory-gib -1", "--memory-gib must be positive"),
        ("--memory-gib 0.5", "the run must fit into the 0.5 GiB of a GPU"),
        ("--gpu v100", "--gpu must be one of b200, h200, "),
        ("--measure", "--measure must be given on a machine with a CUDA GPU"),
        ("--optim.lrr 1", "did you mean --optim.lr?"),
        ("--steps 0", "steps must be positive"),
    ],
)
def test_mistakes(words, why, tmp_path, capsys):
    assert cli.main(["plan", str(write_config(tmp_path)), *words.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("off", [-0.16, -0.14, 0.14, 0.16])
def test_planned_beside_measured(off, monkeypatch, capsys):
    judged = measure.judge(1000 * (1 + off), 1000.0)
    monkeypatch.setattr(measure, "compare", lambda config, device: judged)
    passes = abs(off) < 0.15
    assert cli.main(["plan", "cpu-small", "--measure"]) == (0 if passes else 1)
    said = capsys.readouterr().out
    assert f"measured 1,000 MiB, off by {off:+.1%}" in said
    assert ("FAIL" in said) != passes
