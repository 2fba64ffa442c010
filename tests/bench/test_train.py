"""`nsa bench train` from its words to its rows, on the CPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nsa import cli
from nsa.bench.rows import Row, read_rows
from nsa.bench.train import (
    check_model,
    communication_us,
    fault_of,
    gate_config,
    measure_steps,
    rebatch,
)
from nsa.lm.baseline import dense_of_equal_size, parameters_by_part
from nsa.lm.model import LanguageModel
from nsa.module import NativeSparseAttention
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.load import load_config
from nsa.train.trainer import Trainer
from tests.faults.cases import Ranks
from tests.train.cases import MODEL, write_text

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16}
PATTERN = {**HEADS, "compress_block_size": 8, "compress_stride": 4, "block_size": 16}
PATTERN |= {"num_selected_blocks": 4, "window_size": 32}


def write_config(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """A model with one layer, and steps of two sequences of 64 tokens."""
    model = {"width": MODEL.width, "num_layers": 1, "mlp_hidden_size": 64, "nsa": PATTERN}
    data = {"source": "folder", "path": str(write_text(folder / "text"))}
    batch = {"seq_len": 64, "micro_batch": 2, "accumulation": 1, "global_batch": 2}
    content = {"model": model, "data": data, "compute_dtype": "fp32", "device": "cpu", **batch}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}), encoding="utf-8")
    return path


@pytest.fixture
def path(tmp_path):
    return write_config(tmp_path)


def run(path: Path, words: str = "") -> tuple[int, list[Row]]:
    """Exit code and rows of the command with two timed steps."""
    out = path.with_name("rows.jsonl")
    options = f"--config {path} --steps 2 --warmup 1 --out {out} {words}"
    code = cli.main(["bench", "train", *options.split()])
    return code, read_rows([out])


NSA_STEPS = "--provider nsa --mode fwd_bwd"


def test_sparse_and_dense_models_in_one_run(tmp_path, capsys):
    path = write_config(tmp_path, optim={"grad_clip": 0.5})
    code, rows = run(path, "--variant split:loss_chunk=32,optim.betas=[0.9,0.95]")
    assert code == 0
    names = ("nsa", "dense", "dense-matched", "split")
    expected = [(name, mode) for name in names for mode in ("fwd_bwd", "fwd")]
    assert [(row.provider, row.mode) for row in rows] == expected
    assert len({row.run_id for row in rows}) == 1
    for row in rows:
        assert row.correct is True
        point = (row.case, row.shape, row.choice, row.seq_len, row.batch, row.dtype)
        assert point == ("train", "tiny", "model", 64, 2, "float32")
        assert None not in (row.ms_p20, row.ms_p50, row.ms_p80, row.tokens_per_s, row.tflops_useful)
        assert (row.mfu, row.peak_mib, row.gpu) == (None, None, None)
        assert (row.loss_nats is None) == (row.mode == "fwd")
        assert set(row.errors) >= {"loss", "dattention", "dmlp", "dembedding", "dhead"}
    settings, matched = rows[0].settings or {}, rows[4].settings or {}
    (line,) = re.findall(r"^\| `settings` \|.*", (ROOT / "docs/benchmarks.md").read_text(), re.M)
    assert set(re.findall(r"`(\w+)`", line)) == {"settings", *settings}
    given = {"telemetry": True, "grad_clip": 0.5, "log_every": 2, "document_mask": True}
    assert {name: settings[name] for name in given} == given
    variant = {"loss_chunk": 32, "optim.betas": [0.9, 0.95]}
    dense = {"model.attention": "dense"}
    wider = {**dense, "model.mlp_hidden_size": matched["mlp_hidden_size"]}
    assert [row.changed for row in rows[::2]] == [{}, dense, wider, variant]
    assert "time of dense" in capsys.readouterr().out


def test_a_configuration_is_measured_as_it_is(tmp_path):
    """Whatever it says; the rows say what was changed, and not what the benchmark itself needs."""
    data = {"source": "folder", "path": str(write_text(tmp_path / "text")), "document_mask": False}
    odd: dict[str, Any] = {"seq_len": 32, "micro_batch": 1, "accumulation": 3, "global_batch": 3}
    odd |= {"log_every": 1, "eval_every": 2, "checkpoint_every": 1, "data": data}
    path = write_config(tmp_path, **odd, sample_tokens=5, telemetry=False)
    _, (row,) = run(path, NSA_STEPS)
    assert row.settings is not None
    assert (row.seq_len, row.batch, row.changed, row.is_masked) == (32, 3, {}, False)
    expected = {"micro_batch": 1, "accumulation": 3, "telemetry": False, "log_every": 1}
    assert {name: row.settings[name] for name in expected} == expected
    more = "--seqs 64 --tokens 256 --micro-batch 2 --telemetry true --seed 9"
    _, (_, row) = run(path, f"{NSA_STEPS} {more}")
    batch = {"seq_len": 64, "micro_batch": 2, "accumulation": 2, "global_batch": 4}
    assert row.changed == {**batch, "telemetry": True, "seed": 9}
    assert (row.seq_len, row.batch) == (64, 4)


def test_a_step_lasts_until_the_next_one(path, monkeypatch):
    """Steps under the profiler and before it are not timed."""
    train_step = Trainer.train_step

    def uneven(self, *args):
        step = self.state.progress.step  # three are profiled
        time.sleep(0.5 if step < 5 else 1.5 if step == 7 else 0.1)
        return train_step(self, *args)

    monkeypatch.setattr(Trainer, "train_step", uneven)
    found, _ = measure_steps(load_config(path), CPU, 2, 3)
    assert found["samples"] == 3
    assert 100 <= found["ms_p20"] < 500
    assert found["tokens_per_s"] < 3 * 128 / 1.7
    assert not {"peak_mib", "kernels"} & found.keys()  # on a CPU
    assert found["loss_nats"] > 0


def without_gradient(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention whose input gets no gradient, but for the oracle's."""
    return lambda self, x, *args: attend(self, x.detach() if x.dtype == torch.float32 else x, *args)


def too_large(hidden_states: Callable[..., Any]) -> Callable[..., Any]:
    """Hidden states that are a little off, but for the oracle's and the first, the baseline's."""
    calls = list[Any]()

    def off(self: LanguageModel, tokens: Any, *args: Any, **more: Any) -> Any:
        calls.extend([self] * (self.embedding.weight.dtype == torch.float32))
        return hidden_states(self, tokens, *args, **more) * (1.01 if len(calls) > 1 else 1.0)

    return off


@pytest.mark.parametrize(
    ("kind", "method", "wrong", "why"),
    [
        (LanguageModel, "hidden_states", too_large, "loss: "),
        (NativeSparseAttention, "_attend", without_gradient, "d"),  # with the right loss
    ],
)
def test_a_wrong_model_gets_no_time(
    kind,
    method,
    wrong,
    why,
    path,
    monkeypatch,
):
    monkeypatch.setattr(kind, method, wrong(getattr(kind, method)))
    code, rows = run(path, "--provider nsa")
    assert code == 1
    figures = [(row.correct, row.ms_p50, row.tokens_per_s) for row in rows]
    assert figures == [(False, None, None)] * 2
    assert str(rows[0].note).startswith(why)


def test_the_gate_of_a_deep_model(path):
    """Two layers of it, with what its policy drops computed again."""
    config = load_config(path)
    model, policy = replace(config.model, num_layers=6), CheckpointingConfig("range", 3, 5)
    config = replace(config, model=model, checkpointing=policy)
    small = gate_config(config)
    assert (small.model.num_layers, small.checkpointing.policy, small.seq_len) == (2, "full", 64)
    assert check_model(small, CPU)["correct"]


def test_steps_that_are_not_finite_get_no_figure(path, monkeypatch):
    train_step = Trainer.train_step

    def overflow(self, *args):
        return train_step(self, *args) * torch.tensor([torch.inf, 1, 1]) + torch.tensor([0, 0, 1])

    monkeypatch.setattr(Trainer, "train_step", overflow)
    code, (row,) = run(path, "--provider dense --mode fwd_bwd")
    assert (code, row.correct, row.ms_p50) == (1, False, None)
    assert str(row.note).startswith("loss or gradient not finite in step 1")


FORWARD = ["range_fwd_kernel", "select_kernel", "selected_fwd_kernel", "nvjet_gemm"]
BOTH = [*FORWARD, "range_dq_kernel", "range_dkv_kernel", "selected_dq_kernel"]
# Those of a model with shared keys, whose names say that the window's gradients are among theirs.
ONE_PASS = [*FORWARD, "selected_range_dq_kernel", "selected_range_dkv_kernel"]
FLASH = "pytorch_flash::flash_fwd_kernel"


@pytest.mark.parametrize(
    ("attention", "masked", "kernels", "mode", "fault"),
    [
        ("nsa", True, FORWARD, "fwd", None),
        ("nsa", True, FORWARD, "fwd_bwd", "no kernel with range_dq in its name ran"),
        ("nsa", True, ONE_PASS, "fwd_bwd", None),
        ("nsa", True, [*BOTH, FLASH], "fwd_bwd", "which is attention of another library"),
        ("dense", True, [FLASH], "fwd", None),
        ("dense", True, ["nvjet_gemm"], "fwd", "no kernel with flash or fmha or cudnn or"),
        ("dense", False, [FLASH], "fwd", "no kernel with cudnn in its name ran"),
    ],
)
def test_kernels_are_judged_by_the_model(
    attention: Any, masked: bool, kernels: list[str], mode: str, fault: str | None
) -> None:
    config = TrainConfig()
    data = replace(config.data, document_mask=masked)
    config = replace(config, model=replace(config.model, attention=attention), data=data)
    found = fault_of(config, kernels, mode)
    assert found is None if fault is None else fault in str(found)


# --- What is run
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--variant a:seed=1,seed=2", "with each key once"),
        ("--variant a:compile=true --variant a:seed=1", "the names of runs must differ"),
        ("--variant dense:seed=1", "the names of runs must differ"),
        ("--micro-batch 3 --tokens 256", "micro_batch must divide the 4 sequences of a step"),
        ("--world-size 2 --global-batch 4", "world_size must be 1 or 1, got 2. Start several"),
    ],
)
def test_bad_words_of_the_command(path, words, why, capsys):
    assert cli.main(["bench", "train", "--config", str(path), *words.split()]) == 2
    assert why in capsys.readouterr().err


def test_a_batch_that_processes_cannot_divide():
    with pytest.raises(ValueError, match=r"multiple of the number of processes \(3\), got 4"):
        rebatch(load_config("78m"), world_size=3)


@pytest.mark.parametrize("name", ["78m", "cpu-small"])
def test_the_matched_model_has_as_many_parameters(name):
    model = load_config(name).model
    matched = dense_of_equal_size(model)
    assert matched == replace(model, attention="dense", mlp_hidden_size=matched.mlp_hidden_size)
    models = (model, matched, replace(model, attention="dense"))
    total = [parameters_by_part(config)["total"] for config in models]
    assert abs(total[1] / total[0] - 1) <= 0.01
    assert total[2] < total[1]


# --- Several processes
def test_one_process_and_two(tmp_path):
    """The same global batch, divided; buckets of gradients are settings."""
    batch: dict[str, Any] = {"micro_batch": 2, "accumulation": 2, "global_batch": 4}
    config, out = write_config(tmp_path, **batch), tmp_path / "rows.jsonl"
    run(config, NSA_STEPS)
    options = f"--config {config} {NSA_STEPS} --warmup 1 --steps 2 --out {out}"
    variant = ("--variant", "small:parallel.bucket_mib=0.01")
    with Ranks("bench", "train", *options.split(), *variant, folder=tmp_path) as ranks:
        assert ranks.end() == [0, 0], ranks.text
        assert ranks.ranks[1].text == ""
    rows = read_rows([out])
    settings = [row.settings or {} for row in rows]
    assert [(row.num_gpus, row.provider, row.batch) for row in rows] == [
        (1, "nsa", 4),
        (2, "nsa", 4),
        (2, "small", 4),
    ]
    assert [each["accumulation"] for each in settings] == [2, 1, 1]
    assert [each.get("bucket_mib") for each in settings] == [None, 25.0, 0.01]
    assert (rows[2].changed or {})["parallel.bucket_mib"] == 0.01
    assert [row.loss_nats for row in rows] == pytest.approx([rows[0].loss_nats] * 3, rel=1e-5)
    assert [row.exposed_ms for row in rows] == [None] * 3  # of GPUs alone


SENT = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([], (0, 0, 0)),
        ([(0, 10, "gemm"), (5, 15, SENT)], (10, 5, 0)),
        ([(0, 10, SENT), (5, 15, SENT)], (15, 15, 0)),  # two at a time count once
        ([(0, 4, "a"), (6, 10, "b"), (2, 8, SENT)], (6, 2, 0)),
        ([(0, 1, "a"), (50, 51, SENT)], (1, 1, 49)),  # idle time is not communication
    ],
)
def test_exposed_is_what_nothing_else_hides(spans, found):
    for order in (spans, spans[::-1]):
        assert communication_us(order) == found
