"""Several processes: the same run as one process, resumed on another number or strategy, and
restarted when one dies.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

from nsa.train.checkpoint import list_checkpoints
from nsa.train.telemetry.metrics import read_metrics
from tests.faults.cases import (
    TWO_RANKS,
    Fault,
    Nsa,
    Ranks,
    Words,
    complete,
    events,
    free_port,
    outcome,
    steps_of,
    torchrun,
    undisturbed,
    write_config,
)
from tests.train.cases import reproducible_rows, stored_tensors

FSDP = ("--parallel.strategy", "fsdp")
in_full = pytest.mark.faults


def check_near(path: Path, whole: Path) -> None:
    """Equal rows but for the rounding of sums in another order, for the number of calls that a
    step is divided into, and for the recall, which each process measures on its first batch.
    """
    rows, expected = (
        [
            {name: x for name, x in row.items() if "_calls" not in name and "recall" not in name}
            for row in reproducible_rows(run)
        ]
        for run in (path, whole)
    )
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("whole")
    return undisturbed(folder, steps=20, eval_windows=5, checkpoint_every=6)


def new_run(whole: Path, path: Path) -> Words:
    """Words that start a run like the undisturbed one."""
    return ("train", whole.parent / "tiny.yaml", "--run-dir", path)


def train(
    *words: str | Path, folder: Path, number: int = 2, fault: Fault = (), code: int = 0
) -> str:
    """Run so many processes to their end with this exit code; returns what they said."""
    if number == 1:
        with Nsa(*words, said=folder / "said", fault=fault) as one:
            assert one.end() == code, one.text
        return one.text
    with Ranks(*words, folder=folder, number=number, fault=fault) as run:
        assert run.end() == [code] * number, run.text
    return run.text


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, whole):
    """The same run by two processes with shards, which writes a sample too."""
    folder = tmp_path_factory.mktemp("sharded")
    words = (*new_run(whole, folder / "run"), "--sample-tokens", "9", *TWO_RANKS, *FSDP)
    said = train(*words, folder=folder)
    assert "micro_batch 2 x accumulation 1 x world_size 2 = global_batch 4" in said
    assert "parallel: fsdp over 2 processes, gradients sent in fp32" in said
    assert "step" not in (folder / "said-rank-1").read_text()  # the other one reports
    return folder / "run"


def test_rows_have_the_figures_of_every_rank(whole, sharded):
    for row in read_metrics(sharded / "metrics.jsonl"):
        assert row["step_time_ms_rank_0"] == row["step_time_ms"]
        assert float(row["step_time_ms_rank_1"]) > float(row["data_time_ms_rank_1"]) >= 0
        assert row["step_time_ms_rank_1"] != row["step_time_ms_rank_0"], "one clock for both"
        assert "step_time_ms_rank_2" not in row
    rows = read_metrics(whole / "metrics.jsonl")
    assert not any("_rank_" in name for row in rows for name in row)


def test_shards_train_like_one_process(whole, sharded):
    check_near(sharded, whole)
    found, wanted = (
        stored_tensors(list_checkpoints(path / "checkpoints")[-1]) for path in (sharded, whole)
    )
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert (tensor.shape, tensor.dtype) == (wanted[name].shape, wanted[name].dtype)
        if name.startswith("model."):
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4)
    sample = (sharded / "sample.txt").read_text()
    assert len(sample.partition("--- continuation, temperature 0.8\n")[2]) > 4


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (2, "--micro-batch 2"),
        # What the processes send each other and when.
        pytest.param(
            2,
            "--accumulation 2 --micro-batch 1 --parallel.static-graph true"
            " --parallel.bucket-mib 0.01 --checkpointing.policy full",
            marks=in_full,
        ),
        pytest.param(4, "--micro-batch 1 --parallel.strategy fsdp", marks=in_full),
    ],
    ids=["replicas", "options of replicas", "four shards"],
)
def test_processes_train_like_one(tmp_path, whole, number, words):
    divided = ("--world-size", str(number), *words.split())
    train(*new_run(whole, tmp_path / "run"), *divided, folder=tmp_path, number=number)
    check_near(tmp_path / "run", whole)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=in_full)])
def test_an_index_muon_and_a_tied_head(tmp_path, whole, strategy):
    """Without clipping, whose factor is rounded otherwise, nothing is: the matrices are whole when
    they are orthogonalised.
    """
    muon = "--optim.name muon --optim.grad-clip 0 --loss-chunk 50 --model.tie-head true --steps 9"
    muon += " --model.nsa.scores index --model.nsa.num-selected-blocks 6 --seq-len 128"
    complete(*new_run(whole, tmp_path / "one"), *muon.split(), folder=tmp_path)
    assert all(row["index_loss_nats"] > 0 for row in read_metrics(tmp_path / "one/metrics.jsonl"))
    more = "--sample-tokens 5 --checkpointing.policy full"
    words = (*muon.split(), *more.split(), *TWO_RANKS, "--parallel.strategy", strategy)
    train(*new_run(whole, tmp_path / "run"), *words, folder=tmp_path)
    check_near(tmp_path / "run", tmp_path / "one")
    assert (tmp_path / "run" / "sample.txt").exists()


def halt(*words: str | Path, folder: Path, number: int) -> None:
    """A run that is asked to stop after its tenth step."""
    fault = ("die", "9", "0", str(int(signal.SIGTERM)))
    train(*words, folder=folder, number=number, fault=fault, code=128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("before", "first", "after", "then"),
    [
        pytest.param(1, (), 2, (*TWO_RANKS, *FSDP), marks=in_full),
        (2, (*TWO_RANKS, *FSDP), 2, ("--parallel.strategy", "ddp")),
        (2, TWO_RANKS, 1, ("--world-size", "1", "--accumulation", "2")),
    ],
    ids=["one to shards", "shards to replicas", "replicas to one"],
)
def test_resumed_on_another_number_or_strategy_the_data_go_on(
    tmp_path, whole, before, first, after, then
):
    path = tmp_path / "run"
    halt(*new_run(whole, path), *first, folder=tmp_path, number=before)
    train("train", "--resume", path, *then, folder=tmp_path, number=after)
    check_near(path, whole)
    assert outcome(path)[3] == outcome(whole)[3]  # the place in the data


@pytest.mark.parametrize(
    "words",
    [
        "--accumulation 2 --micro-batch 1",
        "--parallel.strategy fsdp",
        pytest.param(
            "--accumulation 2 --micro-batch 1 --parallel.static-graph true", marks=in_full
        ),
    ],
    ids=["replicas", "shards", "static graph"],
)
def test_three_ranks_resume_bit_for_bit(tmp_path, words):
    """Sums of three are rounded by their order, which two cannot show."""
    path, changes = tmp_path / "run", {"steps": 5, "micro_batch": 2, "accumulation": 1}
    config = write_config(tmp_path, **changes, checkpoint_every=3, log_every=1, eval_windows=0)
    more = ("--world-size", "3", "--global-batch", "6", *words.split())
    train("train", config, "--run-dir", path, *more, folder=tmp_path, number=3)
    undisturbed = outcome(path)
    shutil.rmtree(list_checkpoints(path / "checkpoints")[-1])  # as if killed before it
    train("train", "--resume", path, folder=tmp_path, number=3)
    assert events(path, "resume")[0]["step"] == 3
    assert outcome(path) == undisturbed


@in_full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_nodes_are_two_agents(tmp_path, whole, strategy):
    """Two torchrun agents that find each other as two machines would, with one process each."""
    nodes = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id two --rdzv-endpoint"
    place = (*nodes.split(), f"127.0.0.1:{free_port()}")
    words = (*new_run(whole, tmp_path / "run"), *TWO_RANKS, "--parallel.strategy", strategy)
    with torchrun(*words, place=place) as first, torchrun(*words, place=place) as second:
        said = [agent.communicate(timeout=180)[0] for agent in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    check_near(tmp_path / "run", whole)


def test_ranks_that_are_restarted_resume_the_run(tmp_path, whole):
    """When a rank dies, torchrun repeats the command and counts restarts."""
    path, fault = tmp_path / "run", ("die", "13", "1", str(int(signal.SIGKILL)))
    words = (*new_run(whole, path), *TWO_RANKS)
    with Ranks(*words, folder=tmp_path, fault=fault) as run:
        assert run.ranks[1].end() == -signal.SIGKILL
        last = path / "checkpoints/step-00000012"  # which a thread of the other may still write
        assert run.ranks[0].wait_until(last.exists), run.text
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}
    with Ranks(*words, folder=tmp_path, fault=fault, env=again) as run:
        assert run.end() == [0, 0], run.text
    (resumed,) = events(path, "resume")
    assert resumed["step"] == 12
    assert steps_of(path)[-1] == 20
    check_near(path, whole)
