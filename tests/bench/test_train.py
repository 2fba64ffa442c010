"""`nsa bench train` from its words to its rows, on the CPU."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nsa import cli
from nsa.bench import train
from nsa.bench.rows import Row, read_rows
from nsa.bench.subjects import Batching, as_measured, differences, find_subjects
from nsa.bench.train import fault_of
from nsa.bench.train_gate import check_model, gate_config
from nsa.bench.train_run import MeasuredError, StepClock, measure_steps
from nsa.errors import UserError
from nsa.lm.baseline import MATCHED_WITHIN, dense_of_equal_size, parameters_by_part
from nsa.lm.model import LanguageModel
from nsa.train.config import CheckpointingConfig, TrainConfig
from nsa.train.execution.compilation import Compiled, compilations
from nsa.train.load import load_config
from nsa.train.trainer import Trainer, TrainingStoppedError
from tests.train.cases import MODEL, write_text

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--steps", "2", "--warmup", "1"]


def write_config(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """The model of the trainer's own tests, over a few kilobytes of text."""
    heads = {
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "value_dim": 16,
        "window_size": 32,
        "block_size": 16,
    }
    pattern = {**heads, "compress_block_size": 8, "compress_stride": 4, "num_selected_blocks": 4}
    content = {
        "model": {"width": MODEL.width, "num_layers": 1, "mlp_hidden_size": 64, "nsa": pattern},
        "data": {"source": "folder", "path": str(write_text(folder / "text"))},
        "compute_dtype": "fp32",
        "device": "cpu",
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def small_config(folder: Path, name: str = "tiny", **changes: Any) -> Path:
    """With steps of two windows of 64 tokens."""
    batch = {"seq_len": 64, "micro_batch": 2, "accumulation": 1, "global_batch": 2}
    return write_config(folder, name, **{**batch, **changes})


def run(tmp_path: Path, *words: str) -> tuple[int, list[Row]]:
    out = tmp_path / "rows.jsonl"
    code = cli.main(["bench", "train", *QUICK, "--out", str(out), *words])
    return code, read_rows([out])


def documented_settings() -> set[str]:
    page = (ROOT / "docs/benchmarks.md").read_text()
    (line,) = re.findall(r"^\| `settings` \|(.*)", page, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", line))


def test_sparse_and_dense_models_in_one_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = small_config(tmp_path, optim={"grad_clip": 0.5})
    code, rows = run(
        tmp_path,
        "--config",
        str(path),
        "--variant",
        "split:loss_chunk=32,optim.betas=[0.9,0.95]",
    )
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
        assert (row.mfu, row.peak_mib, row.reserved_mib, row.gpu) == (None, None, None, None)
        assert row.samples == 2
        assert (row.loss_nats is None) == (row.mode == "fwd")
        assert set(row.errors) >= {"loss", "dattention", "dmlp", "dembedding", "dhead"}
    ours, matched = rows[0], rows[4]
    assert ours.settings is not None
    assert matched.settings is not None
    assert matched.settings["parameters"] == pytest.approx(
        ours.settings["parameters"],
        rel=MATCHED_WITHIN,
    )
    assert matched.settings["mlp_hidden_size"] > ours.settings["mlp_hidden_size"]
    assert documented_settings() == set(ours.settings)
    settings = {"telemetry": True, "grad_clip": 0.5, "log_every": 2, "document_mask": True}
    assert {name: ours.settings[name] for name in settings} == settings
    assert [row.variant for row in rows[::2]] == [
        None,
        None,
        None,
        {"loss_chunk": 32, "optim.betas": [0.9, 0.95]},
    ]
    dense, variant = {"model.attention": "dense"}, {"loss_chunk": 32, "optim.betas": [0.9, 0.95]}
    wider = {"model.mlp_hidden_size": matched.settings["mlp_hidden_size"]}
    assert [row.changed for row in rows[::2]] == [{}, dense, {**dense, **wider}, variant]
    assert "time of dense" in capsys.readouterr().out


def test_a_configuration_is_measured_as_it_is(tmp_path: Path) -> None:
    """Whatever it says; the rows say what was changed, and not what the benchmark itself needs."""
    data = {"source": "folder", "path": str(write_text(tmp_path / "text")), "document_mask": False}
    odd: dict[str, Any] = {"seq_len": 32, "micro_batch": 1, "accumulation": 3, "global_batch": 3}
    more: dict[str, Any] = {"log_every": 1, "eval_every": 2, "checkpoint_every": 1, "data": data}
    more |= {"sample_tokens": 5, "telemetry": False}
    path = str(small_config(tmp_path, **odd, **more))
    _, (row,) = run(tmp_path, "--config", path, "--provider", "nsa", "--mode", "fwd_bwd")
    assert row.settings is not None
    assert row.first_step_s is not None
    assert row.slowest_over_median is None  # no step after the fifth
    assert (row.seq_len, row.batch, row.changed) == (32, 3, {})
    expected = {"micro_batch": 1, "accumulation": 3, "telemetry": False, "document_mask": False}
    expected["log_every"] = 1
    assert {name: row.settings[name] for name in expected} == expected
    assert not row.is_masked
    words = ["--config", path, "--provider", "nsa", "--mode", "fwd_bwd", "--seqs", "64"]
    words += ["--tokens", "256", "--micro-batch", "2"]
    _, (_, row) = run(tmp_path, *words, "--telemetry", "true", "--seed", "9")
    batch = {"seq_len": 64, "micro_batch": 2, "accumulation": 2, "global_batch": 4}
    assert row.changed == {**batch, "telemetry": True, "seed": 9}
    assert (row.seq_len, row.batch) == (64, 4)


def test_the_unmasked_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(small_config(tmp_path)), "--provider", "nsa,dense"]
    words += ["--dense-unmasked", "--mode", "fwd_bwd", "--seed", "3"]
    _, rows = run(tmp_path, *words)
    assert [row.provider for row in rows] == ["nsa", "dense", "dense-unmasked"]
    assert [row.is_masked for row in rows] == [True, True, False]
    assert rows[2].changed == {"seed": 3, "model.attention": "dense", "data.document_mask": False}
    assert rows[2].batch == rows[0].batch
    text = capsys.readouterr().out
    changed = "model.attention dense, data.document_mask False, seed 3"
    assert f"tiny, dense-unmasked, S 64 x 2, changed: {changed}\n" in text
    assert rows[0].ms_p50 is not None
    assert rows[2].ms_p50 is not None
    assert f"{rows[0].ms_p50 / rows[2].ms_p50:.3g}" in text


def test_how_a_run_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled late, the slowest step of all after the fifth, the start."""
    train_step = Trainer.train_step

    def uneven(self: Trainer, *args: Any) -> Any:
        step = self.state.progress.step
        if step in (0, 7):
            compilations.add(Compiled(graphs=1))
        time.sleep(0.5 if step in (3, 6, 9) else 0.1)  # the tenth is the one under the profiler
        return train_step(self, *args)

    monkeypatch.setattr(Trainer, "train_step", uneven)
    config = as_measured(load_config(small_config(tmp_path)), 9, 2)
    found, _ = measure_steps(config, torch.device("cpu"), 9, 2)
    assert found.compilations_after_5 == 1
    assert found.slowest_over_median is not None
    assert found.slowest_over_median > 2  # how much more, a busy machine decides
    assert found.first_step_s is not None
    assert 0.1 < found.first_step_s < 60
    assert found.host_ms_p50 is None  # on a CPU


def test_a_wrong_model_gets_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_states = LanguageModel.hidden_states

    def off(self: LanguageModel, tokens: Any, *rest: Any) -> Any:
        scale = 1.0 if self.embedding.weight.dtype == torch.float64 or not calls else 1.01
        calls.append(scale)
        return scale * hidden_states(self, tokens, *rest)

    calls: list[float] = [0.0]
    monkeypatch.setattr(LanguageModel, "hidden_states", off)
    code, rows = run(tmp_path, "--config", str(small_config(tmp_path)), "--provider", "nsa")
    assert code == 1
    assert [(row.correct, row.ms_p50, row.tokens_per_s) for row in rows] == [
        (False, None, None),
    ] * 2
    assert str(rows[0].note).startswith("train loss: ")


def test_a_gradient_that_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss may be right: an attention whose input gets no gradient."""
    config = load_config(small_config(tmp_path))
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
    config = load_config(small_config(tmp_path))
    config = replace(
        config,
        model=replace(config.model, num_layers=6),
        checkpointing=CheckpointingConfig("range", 3, 5),
    )
    small = gate_config(config)
    assert (small.model.num_layers, small.checkpointing.policy, small.seq_len) == (2, "full", 64)
    assert check_model(config, torch.device("cpu")).correct is True


def seen(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """What is seen of the steps has these differences."""

    def measure(*arguments: Any) -> Any:
        found, trainer = measure_steps(*arguments)
        return replace(found, **changes), trainer

    monkeypatch.setattr(train, "measure_steps", measure)


def one_row(tmp_path: Path, *words: str) -> tuple[int, Row]:
    options = ["--config", str(small_config(tmp_path)), "--mode", "fwd_bwd"]
    code, (row,) = run(tmp_path, *options, "--provider", "dense", *words)
    return code, row


def test_steps_that_are_not_finite_get_no_figure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen(monkeypatch, nonfinite=3)
    code, row = one_row(tmp_path)
    assert (code, row.correct, row.ms_p50) == (1, False, None)
    assert row.note == "loss or gradient was not finite in 3 steps"


def test_speed_counts_the_time_between_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen(monkeypatch, seconds=4.0)
    assert one_row(tmp_path)[1].tokens_per_s == 2 * 128 / 4.0


def test_kernels_are_judged_by_the_model() -> None:
    sparse = TrainConfig()
    dense = replace(sparse, model=replace(sparse.model, attention="dense"))
    forward = ["range_fwd_kernel", "select_kernel", "selected_fwd_kernel", "nvjet_gemm"]
    both = [*forward, "range_dq_kernel", "range_dkv_kernel", "selected_dq_kernel"]
    assert fault_of(sparse, forward, "fwd") is None
    assert fault_of(sparse, forward, "fwd_bwd") == "no kernel range_dq* of this library ran"
    assert fault_of(sparse, both, "fwd_bwd") is None
    assert fault_of(sparse, [*both, "pytorch_flash::flash_fwd_kernel"], "fwd_bwd") is not None
    assert fault_of(dense, ["pytorch_flash::flash_fwd_kernel"], "fwd") is None
    why = "no kernel with flash or fmha or cudnn or triton_tem in its name ran"
    assert fault_of(dense, ["nvjet_gemm"], "fwd") == why
    unmasked = replace(dense, data=replace(dense.data, document_mask=False))
    why = "no kernel with cudnn in its name ran"
    assert fault_of(unmasked, ["pytorch_flash::flash_fwd_kernel"], "fwd") == why
    assert fault_of(unmasked, ["cudnn_generated_fort_native_sdpa_fprop"], "fwd") is None


@pytest.mark.parametrize(
    ("error", "code", "correct", "why"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            0,
            None,
            "not run: out of memory. Give --micro-batch 1",
        ),
        (TrainingStoppedError("loss not finite in step 3"), 1, False, "loss not finite in step 3"),
    ],
)
def test_a_run_that_ends_early_says_why(
    error: Exception,
    code: int,
    correct: bool | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(train, "measure_steps", stop)
    found, row = one_row(tmp_path)
    assert (found, row.correct, row.ms_p50, row.note) == (code, correct, None, why)


# ----------------------------------------------------------------------------------- what is run


def test_two_configurations_side_by_side(tmp_path: Path) -> None:
    paths = [small_config(tmp_path, "a"), small_config(tmp_path, "b", seed=3, optim={"lr": 0.01})]
    first, second = find_subjects(paths, {"steps": "7"})
    assert (first.name, first.base, first.config.model.attention, first.config.steps) == (
        "nsa",
        None,
        "nsa",
        7,
    )
    assert (second.name, second.base) == ("b", first.config)
    assert differences(first.config, second.config) == {"seed": 3, "optim.lr": 0.01}
    with pytest.raises(UserError, match="--nonsense"):
        find_subjects(paths, {"nonsense": "7"})


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--variant", "a:compile"], "--variant must be KEY=VALUE"),
        (["--variant", "a:compile=true", "--variant", "a:seed=1"], "must be none of a, dense,"),
        (["--variant", "dense:seed=1"], "the name of a subject must be none of dense,"),
        (["--provider", "flash"], "--provider must be among nsa, dense, dense-matched"),
        (
            ["--micro-batch", "3", "--tokens", "256"],
            "micro_batch must divide the 4 windows of a step",
        ),
        (["--micro-batch", "4"], "at most the 2 windows of a step, got 4. Give --tokens, too."),
        (["--world-size", "2", "--global-batch", "4"], "must be 1, got 2. Give --world-size 1"),
        (["--as-configured"], "nsa bench train: unrecognized arguments: --as-configured"),
        (["--optim.lr", "fast"], "optim.lr must be a valid number"),
    ],
)
def test_bad_words_of_the_command(
    tmp_path: Path,
    words: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--steps", "2", *words]
    assert cli.main(["bench", "train", "--config", str(small_config(tmp_path)), *options]) == 2
    assert why in capsys.readouterr().err


def test_the_batch_of_a_step() -> None:
    seed = load_config("78m")
    assert Batching().apply(seed) == seed
    assert Batching(seq_len=8192).apply(seed) == replace(seed, seq_len=8192)

    def batch(**given: int) -> tuple[int, ...]:
        found = Batching(**given).apply(seed)
        windows = (found.micro_batch, found.accumulation, found.global_batch)
        names = {"seq_len", "micro_batch", "accumulation", "global_batch"}
        assert differences(seed, found).keys() <= names
        return found.seq_len, *windows

    assert batch(tokens=16_384) == (2048, 2, 4, 8)
    assert batch(tokens=65_536, micro_batch=32) == (2048, 32, 1, 32)
    assert batch(tokens=65_536, micro_batch=32, seq_len=8192) == (8192, 8, 1, 8)
    assert batch(tokens=65_536, seq_len=131_072) == (131_072, 1, 1, 1)
    assert batch(micro_batch=4) == (2048, 4, 1, 4)


def test_what_the_benchmark_needs() -> None:
    seed = load_config("78m")
    at = as_measured(seed, 20, 40)
    assert (at.log_every, at.eval_windows, at.sample_tokens, at.checkpoint_every) == (20, 0, 0, 0)
    assert as_measured(replace(seed, steps=9), 20, 40).steps == 62
    for each, expected in ((0, 20), (1, 1), (99, 40)):
        assert as_measured(replace(seed, log_every=each), 20, 40).log_every == expected
    assert set(differences(seed, at)) == {"eval_windows", "sample_tokens", "checkpoint_every"}


@pytest.mark.parametrize("name", ["78m", "117m", "gpu-small", "cpu-small"])
def test_the_matched_model_has_as_many_parameters(name: str) -> None:
    model = load_config(name).model
    matched = dense_of_equal_size(model)
    assert matched == replace(model, attention="dense", mlp_hidden_size=matched.mlp_hidden_size)
    models = (model, matched, replace(model, attention="dense"))
    total = [parameters_by_part(config)["total"] for config in models]
    assert abs(total[1] / total[0] - 1) <= 0.01
    assert total[2] < total[1]


def test_the_clock_counts_steps_and_leaves() -> None:
    clock = StepClock(torch.device("cpu"), warmup=1, steps=2)
    for step in range(4):  # one to warm up, one under the profiler, two timed
        for phase in ("data", "step", "step"):
            clock.beat(phase, step, 1.0)
    with pytest.raises(MeasuredError):
        clock.beat("data", 4, 1.0)
    found = clock.measured([{"step": 2, "loss_nats": 5.0, "nonfinite_steps": 1}])
    assert (found.timing.samples, found.loss_nats, found.nonfinite, found.peak_mib) == (
        2,
        5.0,
        1,
        None,
    )
    assert 0 < found.timing.p50 * 2 <= 1000 * found.seconds * 1.01
    assert (found.compilations_after_5, found.slowest_over_median) == (None, None)
