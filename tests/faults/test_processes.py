"""Several processes: the same run as one process, resumed on another number or strategy, and
restarted when one dies.
"""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.checkpoint import list_checkpoints
from nsa.train.telemetry.metrics import Row, read_metrics
from tests.faults.cases import (
    TWO_RANKS,
    Nsa,
    Ranks,
    complete,
    events,
    outcome,
    torchrun,
    write_config,
)
from tests.train.cases import reproducible_rows, stored_tensors

FSDP = ("--parallel.strategy", "fsdp")


def near(rows: list[Row], expected: list[Row]) -> None:
    """Equal but for the rounding of sums in another order, and for the number of calls that a step
    is divided into.
    """
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        found, wanted = ({k: v for k, v in r.items() if "_calls" not in k} for r in (row, wanted))
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, with its configuration beside it."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(folder, steps=20, eval_windows=5, checkpoint_every=6)
    complete("train", config, "--run-dir", folder / "run", folder=folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> Path:
    """The same run by two processes with shards, which writes a sample too."""
    folder = tmp_path_factory.mktemp("sharded")
    words = ("train", whole / "tiny.yaml", "--run-dir", folder / "run", "--sample-tokens", "9")
    with Ranks(*words, *TWO_RANKS, *FSDP, folder=folder) as run:
        assert run.end() == [0, 0], run.text
        assert "micro_batch 2 x accumulation 1 x world_size 2 = global_batch 4" in run.ranks[0].text
        assert "parallel: fsdp over 2 processes, gradients sent in fp32" in run.ranks[0].text
        assert "step" not in run.ranks[1].text  # one of them speaks
    return folder / "run"


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return stored_tensors(list_checkpoints(path / "checkpoints")[-1])


def test_rows_have_the_figures_of_every_rank(whole: Path, sharded: Path) -> None:
    for row in read_metrics(sharded / "metrics.jsonl"):
        assert row["step_time_ms_rank_0"] == row["step_time_ms"]
        assert float(row["step_time_ms_rank_1"]) > float(row["data_time_ms_rank_1"]) >= 0
        assert row["step_time_ms_rank_1"] != row["step_time_ms_rank_0"], "one clock for both"
        assert "step_time_ms_rank_2" not in row
    rows = read_metrics(whole / "run" / "metrics.jsonl")
    assert not any("_rank_" in name for row in rows for name in row)


def test_shards_train_like_one_process(whole: Path, sharded: Path) -> None:
    near(reproducible_rows(sharded), reproducible_rows(whole / "run"))
    found, wanted = tensors_of(sharded), tensors_of(whole / "run")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype)
        if name.startswith("model."):
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4)
    sample = (sharded / "sample.txt").read_text()
    assert len(sample.partition("--- continuation, temperature 0.8\n")[2]) > 4


# What the processes send each other and when; and micro-batches of one window, of which each
# process has one or two.
DDP_OPTIONS = (
    "--parallel.static-graph",
    "true",
    "--parallel.bucket-mib",
    "0.01",
    "--checkpointing.policy",
    "full",
)
FEW_WINDOWS = ("--micro-batch", "1")


@pytest.mark.parametrize(
    ("number", "accumulation", "words"),
    [
        (2, 1, ()),
        (2, 2, (*FEW_WINDOWS, *DDP_OPTIONS)),
        (4, 1, FEW_WINDOWS),
        (4, 1, (*FEW_WINDOWS, *FSDP)),
    ],
    ids=["replicas", "options of replicas", "four replicas", "four shards"],
)
def test_processes_train_like_one(
    tmp_path: Path,
    whole: Path,
    number: int,
    accumulation: int,
    words: tuple[str, ...],
) -> None:
    divided = ("--world-size", str(number), "--accumulation", str(accumulation), *words)
    with Ranks(
        "train",
        whole / "tiny.yaml",
        "--run-dir",
        tmp_path / "run",
        *divided,
        folder=tmp_path,
        number=number,
    ) as run:
        assert run.end() == [0] * number, run.text
    near(reproducible_rows(tmp_path / "run"), reproducible_rows(whole / "run"))


def test_muon_and_a_tied_head_on_shards(tmp_path: Path, whole: Path) -> None:
    """Without clipping, whose factor is rounded otherwise, nothing is: the matrices are whole when
    they are orthogonalised.
    """
    words: tuple[str | Path, ...] = (
        "train",
        whole / "tiny.yaml",
        "--optim.name",
        "muon",
        "--optim.grad-clip",
        "0",
    )
    words = (*words, "--loss-chunk", "50", "--model.tie-head", "true", "--sample-tokens", "5")
    complete(*words, "--run-dir", tmp_path / "one", folder=tmp_path)
    more = (*TWO_RANKS, "--checkpointing.policy", "full", *FSDP)
    with Ranks(*words, "--run-dir", tmp_path / "run", *more, folder=tmp_path) as run:
        assert run.end() == [0, 0], run.text
    near(reproducible_rows(tmp_path / "run"), reproducible_rows(tmp_path / "one"))
    assert (tmp_path / "run" / "sample.txt").exists()


def halted(words: tuple[str | Path, ...], folder: Path, number: int) -> None:
    """A run that is asked to stop after its tenth step."""
    halt: dict[str, Any] = {"fault": ("die", "9", "0", str(int(signal.SIGTERM)))}
    if number == 1:
        with Nsa(*words, said=folder / "said", **halt) as nsa:
            assert nsa.end() == 128 + signal.SIGTERM, nsa.text
        return
    with Ranks(*words, folder=folder, number=number, **halt) as run:
        assert run.end() == [128 + signal.SIGTERM] * number, run.text


SWITCHES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "one to shards": (1, (), (*TWO_RANKS, *FSDP)),
    "shards to replicas": (2, (*TWO_RANKS, *FSDP), ("--parallel.strategy", "ddp")),
    "replicas to one": (2, TWO_RANKS, ("--world-size", "1", "--accumulation", "2")),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_resumed_on_another_number_or_strategy_the_data_go_on(
    tmp_path: Path,
    whole: Path,
    switch: str,
    count,
) -> None:
    path = tmp_path / "run"
    number, first, then = SWITCHES[switch]
    halted(("train", whole / "tiny.yaml", "--run-dir", path, *first), tmp_path, number)
    if "--world-size" in then and then[then.index("--world-size") + 1] == "1":
        complete("train", "--resume", path, *then, folder=tmp_path)
    else:
        with Ranks("train", "--resume", path, *then, folder=tmp_path) as run:
            assert run.end() == [0, 0], run.text
    near(reproducible_rows(path), reproducible_rows(whole / "run"))
    places = [outcome(run)[3] for run in (path, whole / "run")]
    assert places[0] == places[1]
    count("resumed on another number of processes or strategy, same data and curve", 1, 1)


def test_shards_resume_bit_for_bit(tmp_path: Path, whole: Path, sharded: Path, count) -> None:
    path = tmp_path / "run"
    halted(("train", whole / "tiny.yaml", "--run-dir", path, *TWO_RANKS, *FSDP), tmp_path, 2)
    with Ranks("train", "--resume", path, folder=tmp_path) as run:
        assert run.end() == [0, 0], run.text
    assert outcome(path) == outcome(sharded)
    count("shards resumed bit for bit", 1, 1)


@pytest.mark.faults
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_nodes_are_two_agents(tmp_path: Path, whole: Path, strategy: str, count) -> None:
    """Two torchrun agents that find each other as two machines would, with one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        place,
        "--rdzv-id",
        "two",
    )
    words = (
        "train",
        whole / "tiny.yaml",
        "--run-dir",
        tmp_path / "run",
        *TWO_RANKS,
        "--parallel.strategy",
        strategy,
    )
    agents = [torchrun(*words, place=nodes) for _ in range(2)]
    try:
        said = [agent.communicate(timeout=180)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    near(reproducible_rows(tmp_path / "run"), reproducible_rows(whole / "run"))
    count("two torchrun agents, one run", 1, 1)


def test_rank_that_dies_is_started_anew_and_the_run_resumes(
    tmp_path: Path,
    whole: Path,
    count,
) -> None:
    """SIGKILL to one rank; torchrun ends the other, starts both again with the same words, and the
    run goes on.
    """
    path = tmp_path / "run"
    fault = ("die", "13", "1", str(int(signal.SIGKILL)))
    process = torchrun(
        "train",
        whole / "tiny.yaml",
        "--run-dir",
        path,
        *TWO_RANKS,
        fault=fault,
        restarts=1,
    )
    try:
        said, _ = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 0, said
    (resumed,) = [event for event in events(path) if event["kind"] == "resume"]
    assert resumed["step"] == 12
    assert list_checkpoints(path / "checkpoints")[-1].name == "step-00000020"
    near(reproducible_rows(path), reproducible_rows(whole / "run"))
    count("rank killed under torchrun, restarted and resumed", 1, 1)


def test_what_cannot_be_divided_or_sent_is_refused_before_the_start(
    tmp_path: Path,
    whole: Path,
) -> None:
    path = tmp_path / "run"
    with Ranks(
        "train",
        whole / "tiny.yaml",
        "--run-dir",
        path,
        "--world-size",
        "2",
        folder=tmp_path,
    ) as run:
        assert run.end() == [2, 2]
        rule = "global_batch must equal micro_batch * accumulation * world_size (8)"
        assert f"{rule}, got 4" in run.text
    with Ranks("train", whole / "tiny.yaml", "--run-dir", path, folder=tmp_path) as run:
        assert run.end() == [2, 2]
        rule = "world_size must equal the number of processes launched (2)"
        assert f"{rule}, got 1. Start it with: torchrun" in run.text
    with Ranks("train", whole / "tiny.yaml", *TWO_RANKS, folder=tmp_path) as run:
        assert run.end() == [2, 2]
        assert "--run-dir must be given with torchrun" in run.text
    compressed = ("--parallel.gradient-compression", "bf16")
    with Ranks(
        "train",
        whole / "tiny.yaml",
        "--run-dir",
        path,
        *TWO_RANKS,
        *compressed,
        folder=tmp_path,
    ) as run:
        assert run.end() == [2, 2]
        rule = "parallel.gradient_compression must be none with parallel.strategy ddp on CPUs"
        assert f"{rule}, got bf16" in run.text
    assert not path.exists()
