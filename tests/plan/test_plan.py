"""`nsa plan`: what a run is, what it needs, how long it takes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.bench.rows import Row, RowFile, read_rows
from nsa.bench.subjects import differences
from nsa.cli import bench
from nsa.cli.bench import carried_rows
from nsa.errors import UserError
from nsa.plan import measure
from nsa.plan import plan as planning
from nsa.plan.gpus import GIB, KNOWN, Gpu, find_gpu
from nsa.plan.measure import Comparison, comparison_lines
from nsa.plan.memory import Footprint
from nsa.plan.plan import ASSUMED_MFU, alternatives, expected_speed, make_plan, suggestion
from nsa.plan.report import duration, shown_parts
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.environment import cpu
from nsa.train.load import load_config
from nsa.train.telemetry.throughput import peak_of
from tests.bench.rows import make_row
from tests.bench.test_train import write_config

H200 = KNOWN["h200"]


def footprint(config: TrainConfig) -> Footprint:
    """1 GiB a window of a micro-batch, and 4 GiB in any case."""
    return Footprint({"weights": 4 * GIB, "saved for backward: MLP": config.micro_batch * GIB})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "step_memory", footprint)


def seed(**changes: Any) -> TrainConfig:
    return replace(load_config("78m"), **changes)


# -------------------------------------------------------------------------------------------------------- time and cost


def step(**values: Any) -> Row:
    """A measured training step of the seed configuration's model on an H200."""
    settings = {
        "attention": "nsa", "parameters": 78_601_392, "micro_batch": 32, "compile": True, "cuda_graphs": True,
        "checkpointing": "none", **values.pop("settings", {}),
    }  # fmt: skip
    given = {"case": "train", "choice": "model", "mode": "fwd_bwd", "gpu": "NVIDIA H200", "tokens_per_s": 400e3, "mfu": 0.4}
    return make_row(**{**given, **values}, settings=settings)


def speed(rows: list[Row], mfu: float | None = None, **changes: Any) -> planning.Speed:
    config = seed(micro_batch=32, accumulation=1, global_batch=32, **changes)
    found = expected_speed(config, 78_601_392, 0.5e9, H200, rows, mfu)
    assert found is not None
    return found


def test_a_measured_speed_counts_first() -> None:
    same, slow = step(), step(settings={"micro_batch": 2}, tokens_per_s=250e3)
    found = speed([slow, same])
    assert found.tokens_per_s == 400e3
    assert found.why == "measured: seed, nsa, S 2,048 x 32, compiled, checkpointing none, 2026-01-02"
    assert speed([same, step(tokens_per_s=410e3, date="2026-02-01T00:00:00+00:00")]).tokens_per_s == 410e3
    masked = step(settings={"document_mask": True}, tokens_per_s=390e3)
    for rows in ([same, masked], [masked, same]):
        found = speed(rows)  # its documents are masked, too
        assert (found.tokens_per_s, "document masks" in found.why) == (390e3, True)
    assert speed([same, step(settings={"compile": False}, tokens_per_s=100e3)]).tokens_per_s == 400e3
    assert speed([same], compile=False).tokens_per_s == 400e3  # better than nothing, and it says so
    full = CheckpointingConfig(policy="full")
    recomputed = step(settings={"checkpointing": "full", "micro_batch": 2}, tokens_per_s=300e3)
    assert speed([same, recomputed]).tokens_per_s == 400e3
    assert speed([same, recomputed], checkpointing=full).tokens_per_s == 300e3
    assert speed([same], checkpointing=full).why.count("checkpointing none") == 1
    launched = step(settings={"cuda_graphs": False}, tokens_per_s=390e3, date="2026-02-01T00:00:00+00:00")
    assert speed([same, launched]).tokens_per_s == 400e3
    assert speed([same, slow], mfu=0.1).why == "MFU 0.10, given"


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
def test_what_is_not_comparable_does_not_count(other: dict[str, Any]) -> None:
    found = speed([step(**other)])
    assert found.why == f"MFU {ASSUMED_MFU:.2f}, assumed, nothing like it was measured"
    assert found.tokens_per_s == pytest.approx(ASSUMED_MFU * 989.4e12 / 0.5e9)


def test_the_mfu_of_another_model_or_length() -> None:
    long = step(seq_len=65_536, batch=1, settings={"micro_batch": 1}, mfu=0.3)
    other = step(settings={"parameters": 1}, mfu=0.2)
    found = speed([long, other])
    assert found.tokens_per_s == pytest.approx(0.2 * 989.4e12 / 0.5e9)
    assert found.why.startswith("MFU 0.20 as of seed, nsa, S 2,048 x 32")
    assert speed([long]).why.startswith("MFU 0.30 as of")


def test_time_and_cost(quick: None) -> None:
    config = seed(eval_windows=60, eval_every=1000, world_size=2, global_batch=8)
    plan = make_plan(config, H200, [step()])
    assert plan.tokens == 50_000 * 8 * 2048
    assert plan.speed is not None
    assert plan.speed.tokens_per_s == 800e3
    evaluated = 51 * 60 * 2048 / 3
    assert plan.seconds == pytest.approx((plan.tokens + evaluated) / 800e3)
    assert plan.seconds is not None
    assert plan.cost(3.6) == pytest.approx(plan.seconds / 3600 * 2 * 3.6)
    unknown = make_plan(config, find_gpu(None, 10.0))
    assert (unknown.speed, unknown.seconds, unknown.cost(1.0)) == (None, None, None)


def test_the_peak_of_fp32_is_not_that_of_bf16(quick: None) -> None:
    assert make_plan(seed(compute_dtype="fp32"), H200).speed is None


def test_operations_of_a_token(quick: None) -> None:
    """6 operations a parameter in a product; 12 layers x 12 heads x 128 elements x 6 for each key."""
    model = replace(seed().model, attention="dense")
    plan = make_plan(seed(model=model), None)
    in_products = 256 * 768 + 12 * (768 * 1024 + 768 * 768 + 2 * 768 * 3072)
    assert plan.flops_per_token == pytest.approx(6 * in_products + 6 * 12 * 12 * 128 * 1024.5)


# ------------------------------------------------------------------------------------------------------------------ GPUs


@pytest.mark.parametrize(
    ("key", "spellings"),
    [
        ("b200", "B200, NVIDIA B200, b200-sxm6-180gb"),
        ("h200", "h-200, H 200, h200sxm, H200, h200, NVIDIA H200, h200-sxm, H200 SXM5 141GB, nvidia_h200, H200 141 GB"),
        ("h100", "H100, H100 SXM5, NVIDIA H100 80GB HBM3, h100-80g"),
        ("h100-pcie", "h100pcie, H100 PCIe, NVIDIA H100 PCIe, h100_pcie, PCIe H100 80GB"),
        ("h100-nvl", "H100-NVL, NVIDIA H100 NVL"),
        ("a100", "A100, a100-80gb, NVIDIA A100-SXM4-80GB"),
        ("a100-40", "a100-40, A100 40GB, NVIDIA A100-SXM4-40GB"),
        ("a100-pcie", "NVIDIA A100 80GB PCIe, a100 pcie"),
        ("a100-pcie-40", "NVIDIA A100-PCIE-40GB"),
        ("l40s", "L40S, NVIDIA L40S"),
        ("rtx4090", "4090, RTX 4090, rtx4090, NVIDIA GeForce RTX 4090, geforce-rtx-4090"),
    ],
)
def test_a_gpu_may_be_spelled_in_any_way(key: str, spellings: str) -> None:
    for spelling in [*spellings.split(", "), key, KNOWN[key].name]:
        assert find_gpu(spelling, None) == KNOWN[key], spelling


@pytest.mark.parametrize("other", ["GB200", "H200 NVL", "RTX 3090", "H100 PCIe NVL", "CPU H200", "", "40GB"])
def test_another_gpu_is_not_taken_for_a_known_one(other: str) -> None:
    with pytest.raises(UserError, match="For another one give --memory-gib alone"):
        find_gpu(other, None)


def test_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Its memory is that of the machine; what a step holds beside the model's state is not known there."""
    for spelling in ("cpu", "CPU"):
        assert find_gpu(spelling, None) == Gpu("CPU", cpu()["memory_gib"])
        assert find_gpu(spelling, 8.0) == Gpu("CPU", 8.0)
    words = ["plan", "cpu-small", "--gpu", "cpu", "--optim.name", "adamw"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts, parameters = found["memory_bytes"], 990_384
    assert {*parts} == {"weights", "gradients", "optimizer", "peak", "needed"}
    assert (parts["weights"], parts["gradients"]) == (4 * parameters, 4 * parameters)
    assert parts["optimizer"] == pytest.approx(8 * parameters, rel=1e-4)  # and a count of steps for each tensor
    assert (found["memory_is_all"], found["tokens_per_s"], found["seconds"]) == (False, None, None)
    assert cli.main([*words, "--memory-gib", "0.5"]) == 2
    said = capsys.readouterr()
    assert "at least 1.02 GiB for each process" in said.out
    assert "the run must fit into the 0.5 GiB of CPU, got 1.0 GiB" in said.err


# ---------------------------------------------------------------------------------------------------------------- memory


def test_what_a_gpu_must_have(quick: None) -> None:
    for replayed in (False, True):
        assert make_plan(seed(cuda_graphs=replayed), H200).needed_bytes == pytest.approx(6 * GIB * 1.05 + GIB)


def test_a_run_that_does_not_fit_is_refused_with_a_way_out(quick: None) -> None:
    config = seed(micro_batch=32, accumulation=1, global_batch=32, cuda_graphs=False)
    gpu = find_gpu("h200", 24.0)
    assert gpu is not None
    plan = make_plan(config, gpu)
    with pytest.raises(UserError) as caught:
        planning.refuse_what_does_not_fit(plan)
    assert str(caught.value) == (
        "nsa plan: the run must fit into the 24.0 GiB of NVIDIA H200, got 38.8 GiB. "
        "It takes 22.0 GiB with --micro-batch 16 --accumulation 2."
    )
    planning.refuse_what_does_not_fit(make_plan(config, H200))
    planning.refuse_what_does_not_fit(make_plan(config, None))
    smallest = find_gpu(None, 4.0)
    assert smallest is not None
    assert suggestion(config, smallest).startswith("Nothing that trains the same makes it fit")


def test_changes_that_need_less_train_the_same() -> None:
    config = seed(compile=False, cuda_graphs=False, micro_batch=6, accumulation=1, global_batch=6)
    large = replace(config, model=replace(config.model, vocab_size=50_257))
    changes = [differences(large, changed) for changed in alternatives(large)]
    pieces, halved, single = {"loss_chunk": 1024}, {"micro_batch": 3, "accumulation": 2}, {"micro_batch": 1, "accumulation": 6}
    full = {**single, **pieces, "checkpointing.policy": "full"}
    assert changes == [
        {"compile": True},
        pieces,
        {**halved, **pieces},
        {**single, **pieces},
        {**single, **pieces, "checkpointing.policy": "operators"},
        full,
        {**full, "accumulation": 3, "world_size": 2, "parallel.strategy": "fsdp"},
    ]
    assert all(changed.global_batch == 6 for changed in alternatives(large))
    several = replace(config, world_size=2, global_batch=12, compile=True, checkpointing=CheckpointingConfig("full"))
    assert [*alternatives(several)][-2].parallel.strategy == "fsdp"
    assert [*alternatives(several)][-1].world_size == 4


@pytest.mark.parametrize(("name", "gib", "why"), [("h300", None, "--gpu must be one of"), (None, -1.0, "--memory-gib must be")])
def test_a_gpu_that_is_none(name: str | None, gib: float | None, why: str) -> None:
    with pytest.raises(UserError, match=why):
        find_gpu(name, gib)


def test_every_gpu_has_a_peak() -> None:
    assert all(peak_of(gpu.name) for gpu in KNOWN.values())


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(tmp_path))
    words = ["plan", path, "--gpu", "h100", "--price-per-gpu-hour", "2", "--steps", "1000", "--rows", str(tmp_path)]
    words += ["--compute-dtype", "bf16"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{path}, on 1 x NVIDIA H100 80GB HBM3 of 79.2 GiB\n")
    for line in (
        "tokens      8,192,000 = 1,000 steps x 4 windows x 2,048",
        "weights ",
        "saved for backward: attention",
        "assumed, nothing like it was measured",
        "GPU hours x 2",
    ):
        assert line in said
    RowFile(tmp_path / "rows.jsonl").add(step(gpu=KNOWN["h100"].name, mfu=0.5))
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speed_from"].startswith("MFU 0.50 as of seed")
    parts = found["memory_bytes"]
    assert parts["peak"] == sum(size for part, size in parts.items() if part not in ("peak", "needed"))
    assert found["cost"] == pytest.approx(found["seconds"] / 1800)


def test_rows_of_every_policy_are_found(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_PACKAGE", tmp_path / "nsa")
    words = ["plan", "78m", "--gpu", "h200", "--json"]
    operators = [*words, "--checkpointing.policy", "operators"]

    def found(words: list[str]) -> float:
        assert cli.main(words) == 0
        return float(json.loads(capsys.readouterr().out)["tokens_per_s"])

    guess = found(words)
    RowFile(tmp_path / "benchmarks/results/a.jsonl").add(step())
    assert (found(words), found(operators)) == (400e3, 400e3)
    RowFile(tmp_path / "benchmarks/memory/a.jsonl").add(step(settings={"checkpointing": "operators"}, tokens_per_s=350e3))
    assert (found(words), found(operators)) == (400e3, 350e3)
    assert found([*operators, "--rows", "benchmarks/results"]) == 400e3
    assert guess != 400e3


def test_committed_rows_give_the_speed_of_a_policy() -> None:
    rows = read_rows(carried_rows("results", "memory"))
    found = {
        policy: speed(rows, checkpointing=CheckpointingConfig(policy)) for policy in ("none", "every", "operators", "full")
    }
    assert all(f"checkpointing {policy}" in one.why for policy, one in found.items())
    assert found["none"].tokens_per_s > found["operators"].tokens_per_s > found["full"].tokens_per_s


def test_refusal_and_bad_configurations_end_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(tmp_path))
    assert cli.main(["plan", path, "--memory-gib", "0.5"]) == 2
    assert "the run must fit into the 0.5 GiB of a GPU" in capsys.readouterr().err
    said: dict[str, list[str]] = {}
    for command in ("plan", "train"):
        said[command] = []
        for words in (
            [str(tmp_path / "tony.yaml")],
            [path, "--optim.lr", "fast"],
            [path, "--optim.lrr", "1"],
            [path, "--steps", "0"],
        ):
            assert cli.main([command, *words]) == 2
            said[command].append(capsys.readouterr().err.replace(f"nsa {command}: ", ""))
    assert said["plan"] == said["train"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--rows", "nowhere"], "--rows must be a file or folder of rows that exists, got nowhere"),
        (["--mfu", "2"], "--mfu must be at most 1"),
        (["--price-per-gpu-hour", "0"], "--price-per-gpu-hour must be positive"),
        (["--gpu", "v100"], "--gpu must be one of b200, h200, "),
    ],
)
def test_bad_words(tmp_path: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(write_config(tmp_path)), *words]) == 2
    assert why in capsys.readouterr().err


def test_planned_beside_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_config(tmp_path))
    assert cli.main(["plan", path, "--measure"]) == 2
    assert "--measure must be given on a machine with a CUDA GPU" in capsys.readouterr().err
    for peak, code in ((1090.0, 0), (1120.0, 1)):
        monkeypatch.setattr(measure, "compare", lambda name, config, device, peak=peak: Comparison(name, peak, 1000.0, 1200.0))
        assert cli.main(["plan", path, "--measure"]) == code
        assert ("FAIL" in capsys.readouterr().out) == bool(code)
    assert not Comparison("a", 899.0, 1000.0, 1000.0).passed
    assert comparison_lines([Comparison("a", 950.0, 1000.0, 1200.0)])[1].split() == [
        "a",
        "950",
        "1,000",
        "-5.0%",
        "1,200",
        "pass",
    ]


def test_numbers_for_readers() -> None:
    assert [duration(seconds) for seconds in (40, 600, 12_000, 183_600)] == ["40 s", "10 min", "3 h 20 min", "2 d 3 h"]
    parts = shown_parts({"b": 10, "weights": 500, "tiny": 0, "saved for backward: MLP": 9_490})
    assert list(parts.items()) == [("weights", 500), ("saved for backward: MLP", 9_490), ("b", 10), ("other", 0)]
