"""`nsa bench train` from its words to its rows, on the CPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nsa import cli
from nsa.bench import train
from nsa.bench.rows import Row, read_rows
from nsa.bench.subjects import Batching, differences, find_subjects
from nsa.bench.train import fault_of
from nsa.bench.train_gate import check_model, gate_config
from nsa.bench.train_run import StepClock, _MeasuredError, measure_steps
from nsa.errors import UserError
from nsa.lm.model import LanguageModel
from nsa.lm.twins import MATCHED_WITHIN, dense_matched, parameters_by_part, twin
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.load import load_config
from nsa.train.trainer import TrainingStoppedError
from tests.train.cases import MODEL, write_text

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
QUICK = ["--seqs", "64", "--tokens", "128", "--steps", "2", "--warmup", "1"]


def write_config(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """The model of the trainer's own tests, over a few kilobytes of text."""
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16, "window_size": 32, "block_size": 16}
    pattern = {**heads, "compress_block_size": 8, "compress_stride": 4, "num_selected_blocks": 4}
    content = {
        "model": {"width": MODEL.width, "num_layers": 1, "mlp_hidden_size": 64, "nsa": pattern},
        "data": {"source": "folder", "path": str(write_text(folder / "text"))},
        "compute_dtype": "fp32", "device": "cpu", **changes,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def run(tmp_path: Path, *words: str) -> tuple[int, list[Row]]:
    out = tmp_path / "rows.jsonl"
    code = cli.main(["bench", "train", *QUICK, "--out", str(out), *words])
    return code, read_rows([out])


def documented_settings() -> set[str]:
    (line,) = [line for line in (ROOT / "docs/benchmarks.md").read_text().splitlines() if line.startswith("| `settings` |")]
    return set(re.findall(r"`(\w+)`", line.partition("|")[2].partition("|")[2]))


def test_sparse_and_dense_models_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(tmp_path, optim={"grad_clip": 0.5})
    code, rows = run(tmp_path, "--config", str(path), "--variant", "split:loss_chunk=32,optim.betas=[0.9,0.95]")
    assert code == 0
    names = ("nsa", "dense", "dense-matched", "split")
    assert [(row.provider, row.mode) for row in rows] == [(name, mode) for name in names for mode in ("fwd_bwd", "fwd")]
    assert len({row.run_id for row in rows}) == 1
    for row in rows:
        assert row.correct is True
        assert (row.case, row.shape, row.choice, row.seq_len, row.batch, row.dtype) == (
            "train",
            "tiny",
            "model",
            64,
            2,
            "float32",
        )
        assert None not in (row.ms_p20, row.ms_p50, row.ms_p80, row.tokens_per_s, row.tflops_useful)
        assert (row.mfu, row.peak_mib, row.reserved_mib, row.gpu) == (None, None, None, None)
        assert row.samples == 2
        assert (row.loss_nats is None) == (row.mode == "fwd")
        assert set(row.errors) >= {"loss", "dattention", "dmlp", "dembedding", "dhead"}
    ours, matched = rows[0], rows[4]
    assert ours.settings is not None
    assert matched.settings is not None
    assert matched.settings["parameters"] == pytest.approx(ours.settings["parameters"], rel=MATCHED_WITHIN)
    assert matched.settings["mlp_hidden_size"] > ours.settings["mlp_hidden_size"]
    assert documented_settings() == set(ours.settings)
    expected = {"telemetry": True, "grad_clip": 0.5, "log_every": 2, "document_mask": False}  # as measured, not as in the file
    assert {name: ours.settings[name] for name in expected} == expected
    assert [row.variant for row in rows[::2]] == [None, None, None, {"loss_chunk": 32, "optim.betas": [0.9, 0.95]}]
    assert "time of dense" in capsys.readouterr().out


def test_a_wrong_model_gets_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states = LanguageModel.hidden_states

    def off(self: LanguageModel, tokens: Any, *rest: Any) -> Any:
        scale = 1.0 if self.embedding.weight.dtype == torch.float64 or not calls else 1.01
        calls.append(scale)
        return scale * hidden_states(self, tokens, *rest)

    calls: list[float] = [0.0]
    monkeypatch.setattr(LanguageModel, "hidden_states", off)
    code, rows = run(tmp_path, "--config", str(write_config(tmp_path)), "--provider", "nsa")
    assert code == 1
    assert [(row.correct, row.ms_p50, row.tokens_per_s) for row in rows] == [(False, None, None)] * 2
    assert str(rows[0].note).startswith("train loss: ")


def test_a_gradient_that_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss may be right: an attention whose input gets no gradient."""
    config = load_config(write_config(tmp_path))
    assert check_model(config, torch.device("cpu")).correct is True
    from nsa.module import NativeSparseAttention

    attend = NativeSparseAttention._attend
    monkeypatch.setattr(
        NativeSparseAttention,
        "_attend",
        lambda self, x, *rest: attend(self, x.detach() if x.dtype == torch.float32 else x, *rest),
    )
    verdict = check_model(config, torch.device("cpu"))
    assert verdict.correct is False
    assert verdict.note is not None
    assert verdict.note.startswith("train d")


def test_the_gate_of_a_deep_model(tmp_path: Path) -> None:
    """Two layers of it, with what its policy drops computed again."""
    config = load_config(write_config(tmp_path))
    config = replace(config, model=replace(config.model, num_layers=6), checkpointing=CheckpointingConfig("range", 3, 5))
    small = gate_config(config)
    assert (small.model.num_layers, small.checkpointing.policy, small.seq_len) == (2, "full", 64)
    assert check_model(config, torch.device("cpu")).correct is True


def test_steps_that_are_not_finite_get_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nonfinite(*arguments: Any) -> Any:
        found, trainer = measure_steps(*arguments)
        return replace(found, nonfinite=3), trainer

    monkeypatch.setattr(train, "measure_steps", nonfinite)
    code, rows = run(tmp_path, "--config", str(write_config(tmp_path)), "--provider", "nsa", "--mode", "fwd_bwd")
    assert code == 1
    assert [(row.correct, row.ms_p50, row.note) for row in rows] == [
        (False, None, "loss or gradient was not finite in 3 steps")
    ]


def test_speed_counts_the_time_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        found, trainer = measure_steps(*arguments)
        return replace(found, seconds=4.0), trainer

    monkeypatch.setattr(train, "measure_steps", slow)
    _, (row,) = run(tmp_path, "--config", str(write_config(tmp_path)), "--provider", "dense", "--mode", "fwd_bwd")
    assert row.tokens_per_s == 2 * 128 / 4.0


def test_kernels_are_judged_by_the_model() -> None:
    sparse = TrainConfig()
    dense = replace(sparse, model=twin(sparse.model, "dense"))
    forward = ["range_fwd_kernel", "select_kernel", "selected_fwd_kernel", "nvjet_gemm"]
    both = [*forward, "range_dq_kernel", "range_dkv_kernel", "selected_dq_kernel"]
    assert fault_of(sparse, forward, "fwd") is None
    assert fault_of(sparse, forward, "fwd_bwd") == "no kernel range_dq* of this library ran"
    assert fault_of(sparse, both, "fwd_bwd") is None
    assert fault_of(sparse, [*both, "pytorch_flash::flash_fwd_kernel"], "fwd_bwd") is not None
    assert fault_of(dense, ["pytorch_flash::flash_fwd_kernel"], "fwd") == "no kernel with cudnn in its name ran"
    assert fault_of(dense, ["cudnn_generated_fort_native_sdpa_fprop"], "fwd") is None


def test_a_model_that_does_not_fit_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(train, "measure_steps", too_much)
    code, rows = run(tmp_path, "--config", str(write_config(tmp_path)), "--provider", "dense")
    assert code == 0
    assert [(row.correct, row.note) for row in rows] == [(None, "not run: out of GPU memory")] * 2


def test_a_run_that_stops_itself_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> Any:
        raise TrainingStoppedError("loss not finite in step 3")

    monkeypatch.setattr(train, "measure_steps", stop)
    code, rows = run(tmp_path, "--config", str(write_config(tmp_path)), "--provider", "dense", "--mode", "fwd")
    assert code == 1
    assert [(row.correct, row.ms_p50, row.note) for row in rows] == [(False, None, "loss not finite in step 3")]


# ----------------------------------------------------------------------------------------------------------- what is run


def test_two_configurations_side_by_side(tmp_path: Path) -> None:
    paths = [write_config(tmp_path, "a"), write_config(tmp_path, "b", seed=3, optim={"lr": 0.01})]
    first, second = find_subjects(paths, {"steps": "7"}, {}, None)
    assert (first.name, first.base, first.config.model.attention, first.config.steps) == ("nsa", None, "nsa", 7)
    assert (second.name, second.base) == ("b", first.config)
    assert differences(first.config, second.config) == {"seed": 3, "optim.lr": 0.01}
    with pytest.raises(UserError, match="--nonsense"):
        find_subjects(paths, {"nonsense": "7"}, {}, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "compile"], "--set must be KEY=VALUE"),
        (["--variant", "a:compile=true", "--variant", "a:seed=1"], "--variant must have names of their own"),
        (["--variant", "dense:seed=1"], "the name of a variant must be none of nsa, dense"),
        (["--provider", "flash"], "--provider must be among nsa, dense, dense-matched"),
        (["--micro-batch", "3", "--tokens", "256"], "--micro-batch must divide the 4 windows"),
        (["--set", "optim.lr=fast"], "optim.lr must be a number"),
    ],
)
def test_bad_words_of_the_command(tmp_path: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seqs", "64", "--steps", "2", *words]
    assert cli.main(["bench", "train", "--config", str(write_config(tmp_path)), *options]) == 2
    assert why in capsys.readouterr().err


def test_the_batch_of_a_step() -> None:
    seed = load_config(CONFIGS / "seed.yaml")
    at = Batching().apply(seed, 8192, 20, 40)
    assert (at.seq_len, at.micro_batch, at.accumulation, at.global_batch) == (8192, 8, 1, 8)
    assert (at.log_every, at.eval_windows, at.sample_tokens, at.checkpoint_every) == (20, 0, 0, 0)
    assert (at.optim, at.data.document_mask, at.steps) == (seed.optim, False, seed.steps)
    split = Batching(16_384, micro_batch=2).apply(seed, 2048, 20, 40)
    assert (split.micro_batch, split.accumulation, split.global_batch) == (2, 4, 8)
    as_is = Batching(as_configured=True).apply(seed, 0, 20, 40)
    assert (as_is.seq_len, as_is.micro_batch, as_is.accumulation) == (2048, 2, 2)


@pytest.mark.parametrize("name", ["seed", "seed-gpt2", "gpu-small", "cpu-small"])
def test_the_matched_model_has_as_many_parameters(name: str) -> None:
    model = load_config(CONFIGS / f"{name}.yaml").model
    matched = dense_matched(model)
    assert matched == replace(model, attention="dense", mlp_hidden_size=matched.mlp_hidden_size)
    total = [parameters_by_part(config)["total"] for config in (model, matched, twin(model, "dense"))]
    assert abs(total[1] / total[0] - 1) <= 0.01
    assert total[2] < total[1]


def test_the_clock_counts_steps_and_leaves() -> None:
    clock = StepClock(torch.device("cpu"), warmup=1, steps=2)
    for step in range(4):  # one to warm up, one under the profiler, two timed
        for phase in ("data", "step", "step"):
            clock.beat(phase, step, 1.0)
    with pytest.raises(_MeasuredError):
        clock.beat("data", 4, 1.0)
    found = clock.measured([{"step": 2, "loss_nats": 5.0, "nonfinite_steps": 1}])
    assert (found.timing.samples, found.loss_nats, found.nonfinite, found.peak_mib) == (2, 5.0, 1, None)
    assert 0 < found.timing.p50 * 2 <= 1000 * found.seconds * 1.01
