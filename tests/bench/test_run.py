"""`nsa bench attention` from its options to its rows, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from nsa import cli
from nsa.bench import attention, implementations
from nsa.bench.attention import Plan, bench_attention
from nsa.bench.cases import CASES, Problem
from nsa.bench.implementations import (
    IMPLEMENTATIONS,
    Kernels,
    PyTorch,
    Reference,
    Work,
    override_tiles,
)
from nsa.bench.points import parse_shape
from nsa.bench.rows import Row, read_rows
from nsa.bench.variants import Variant
from nsa.ops._triton.tuning import tile_for

TINY = ["--shape", "2x1x16x16", "--seqs", "128", "--tokens", "256", "--dtype", "float32"]
QUICK = [*TINY, "--provider", "reference", "--budget-ms", "1"]
CPU = torch.device("cpu")


def run(tmp_path: Path, *words: str) -> tuple[int, list[Row]]:
    out = tmp_path / "results" / "rows.jsonl"
    code = cli.main(["bench", "attention", *QUICK, "--out", str(out), *words])
    return code, read_rows([out])


def test_the_reference_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = run(tmp_path)
    assert code == 0
    expected = [(case.name, mode) for case in CASES.values() for mode in case.modes]
    assert [(row.case, row.mode) for row in rows] == expected
    assert len({row.run_id for row in rows}) == 1
    for row in rows:
        assert row.correct is True
        assert row.ms_p20 is not None
        assert row.ms_p50 is not None
        assert row.ms_p80 is not None
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        how = (row.provider, row.timing, row.kernels, row.peak_mib, row.gpu)
        assert how == ("reference", "cpu", [], None, None)
        point = (row.shape, row.choice, row.seq_len, row.batch, row.dtype)
        assert point == ("2x1x16x16", "random", 128, 2, "float32")
        assert (row.tflops_useful is None) != (row.tbps_useful is None)
        assert (row.samples or 0) >= 3
    said = capsys.readouterr().out
    assert "S 128 x 2, choice random" in said
    assert sum(line.startswith("attention.window") for line in said.splitlines()) == 2


def test_the_options_say_what_is_measured(tmp_path: Path) -> None:
    words = ["--case", "attention.choice,attention", "--choice", "shared16,random", "--recall"]
    code, rows = run(tmp_path, *words)
    assert code == 0
    each = [("attention.choice", "fwd", 1.0), *(("attention", m, None) for m in ("fwd", "fwd_bwd"))]
    assert [(row.case, row.mode, row.recall) for row in rows] == each * 2
    assert [row.choice for row in rows] == ["shared16"] * 3 + ["random"] * 3


class Wrong(Reference):
    """The reference, a little off in the window."""

    def work(self, problem: Problem) -> Work:
        work = super().work(problem)
        off = 1.01 if problem.case.name == "attention.window" else 1.0

        def forward() -> tuple[Tensor, ...]:
            return tuple(off * out for out in work.forward())

        return replace(work, forward=forward)


def test_a_wrong_result_gets_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "reference", Wrong("reference"))
    code, rows = run(tmp_path, "--case", "attention.window,attention.combine")
    assert code == 1
    assert [row.correct for row in rows] == [False, False, True, True]
    for row in rows[:2]:
        figures = (row.ms_p50, row.ms_p20, row.ms_p80, row.tflops_useful, row.peak_mib, row.timing)
        assert figures == (None,) * 6
        assert str(row.note).startswith("attention.window out: error 0.0")
    assert "WRONG: attention.window out: error" in capsys.readouterr().out


def test_an_implementation_whose_kernel_did_not_run_gets_no_figure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Reference, "fault", lambda self, kernels, *_: f"only {kernels} ran")
    monkeypatch.setattr(attention, "kernel_times", lambda call, device: {"sgemm": 1.0})
    monkeypatch.setattr(attention, "judges_kernels", lambda device: True)
    code, rows = run(tmp_path, "--case", "attention.window")
    assert code == 1
    assert len(rows) == 2
    for row in rows:
        assert (row.correct, row.ms_p50, row.note) == (False, None, "only ['sgemm'] ran")
        assert row.kernels == ["sgemm"]


def refuse(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any) -> Any:
        raise error

    return raises


def test_what_does_not_run_says_why_and_is_no_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(implementations, "free_gib", lambda device: 1e-6)
    code, rows = run(tmp_path, "--case", "attention.window,attention.combine")
    assert code == 0
    assert [row.correct for row in rows] == [None, None, True, True]
    assert str(rows[0].note).startswith("not run: the reference would need about 0 GiB")
    monkeypatch.setattr(Work, "run", refuse(torch.OutOfMemoryError("CUDA out of memory")))
    _, rows = run(tmp_path, "--case", "attention.combine")
    assert [row.note for row in rows[-2:]] == ["not run: out of GPU memory"] * 2
    monkeypatch.setattr(Work, "run", refuse(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path, "--case", "attention.combine")


def test_what_others_do_not_support_is_said(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """PyTorch that has no kernel or does not compile here, a tile that does not fit."""
    monkeypatch.setattr(implementations, "kernels_run_on_cpu", lambda: True)
    too_large = OutOfResources(300_000, 232_448, "shared memory")
    monkeypatch.setattr(Kernels, "work", refuse(too_large))
    out, notes = tmp_path / "rows.jsonl", []
    words = ["bench", "attention", *TINY, "--case", "attention", "--out", str(out), "--provider"]
    for error in (RuntimeError("No available kernel. Aborting execution.\nmore"), TritonError()):
        monkeypatch.setattr(PyTorch, "work", refuse(error))
        assert cli.main([*words, "dense-cudnn", "--variant", "large:*.rows=256"]) == 0
        notes = [row.note for row in read_rows([out])[::2]]
    reason = "not run: out of resource: shared memory, Required: 300000, Hardware limit: 232448."
    assert notes[::2] == [
        "not run: No available kernel. Aborting execution.",
        "not run: TritonError",
    ]
    assert all(str(note).startswith(reason) for note in notes[1::2])
    with pytest.raises(OutOfResources):
        cli.main([*words, "nsa"])


# -------------------------------------------------------------------------------------- mistakes


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(implementations, "kernels_run_on_cpu", lambda: False)


NO_GPU = "this machine must have a CUDA GPU for"
KNOWN = "nsa, dense-cudnn, dense-fa2, flex, tiled, gathered, reference"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", f"{NO_GPU} nsa, dense-cudnn, dense-fa2, flex, reference, got none."),
        ("--provider reference,flex", f"{NO_GPU} reference, flex, got none."),
        ("--provider reference --variant a:phi=mean", f"{NO_GPU} reference, a, got none."),
        ("--provider fa3", f"--provider must be among {KNOWN}, got 'fa3'."),
        ("--case attention.windows", "--case must be among attention, "),
        ("--choice shared8", "--choice must be among random, shared4, shared16, got 'shared8'."),
        ("--seqs 2k", "--seqs must be positive lengths"),
        ("--seqs 2048,0", "--seqs must be positive lengths"),
        ("--seqs 64 --provider reference", "--seqs must be at least 128, got 64."),
        ("--tokens 0", "--tokens must be at least 1, got 0."),
        ("--shape sead", "--shape must be one of seed, wide, paper"),
        ("--dtype bf16", "argument --dtype: invalid choice: 'bf16'"),
        ("--variant nsa:phi=mean", "--variant must have another name than nsa,"),
        ("--variant a:phi=mean --variant a:phi=mean", "--variant must have another name than nsa,"),
        ("--out rows.jsonl --speed 1", "nsa bench attention: unrecognized arguments: --speed"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_mistake_ends_in_one_line(
    words: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "attention", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert why in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["tune"], "nsa bench tune: this machine must have a CUDA GPU, got none."),
        (["atention"], "nsa bench: unrecognized command: atention; did you mean attention?"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_command_that_is_none(
    words: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", *words]) == 2
    assert why in capsys.readouterr().err


COMMANDS = ("attention", "train", "scaling", "host", "tune", "guard", "report")


def test_bench_without_a_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    said = capsys.readouterr().out
    assert all(command in said for command in COMMANDS)


# ------------------------------------------------------------------------- whose kernels have run

WHOLE_FORWARD = ["compress_fwd_kernel", "range_fwd_kernel", "select_kernel", "selected_fwd_kernel"]
WHOLE_BACKWARD = ["compress_dx_kernel", "range_dq_kernel", "range_dkv_kernel"]
COMBINE = ["combine_fwd_kernel", "combine_bwd_kernel"]
OURS = dict.fromkeys((*WHOLE_FORWARD, *WHOLE_BACKWARD, *COMBINE))
RANGE = ["range_fwd_kernel", "range_dq_kernel", "range_dkv_kernel"]
COPY = "at::native::elementwise_kernel"
SELECT, FOREIGN = "select_kernel", "which is not of this library"
NO_RANGE = "no kernel range_fwd* of this library ran"


@pytest.mark.parametrize(
    ("case", "mode", "kernels", "fault"),
    [
        ("attention.window", "fwd", ["range_fwd_kernel", COPY], None),
        ("attention.window", "fwd", ["range_fwd_kernel_window", COPY], None),
        ("attention.window", "fwd", [COPY], NO_RANGE),
        ("attention.window", "fwd", ["triton_tem_range_fwd"], NO_RANGE),
        ("attention.window", "fwd_bwd", RANGE[:2], "no kernel range_dkv* of this library ran"),
        ("attention.window", "fwd_bwd", RANGE, None),
        ("attention.choice", "fwd", ["selected_fwd_kernel"], "no kernel select_* of this library"),
        ("attention.choice", "fwd", [SELECT, "nvjet_hsh_64x8"], f"nvjet_hsh_64x8 ran, {FOREIGN}"),
        (
            "attention.choice",
            "fwd",
            [SELECT, "cutlass::Kernel2"],
            f"cutlass::Kernel2 ran, {FOREIGN}",
        ),
        ("attention.choice", "fwd", [SELECT, "triton_poi_add"], f"triton_poi_add ran, {FOREIGN}"),
        ("attention", "fwd", WHOLE_FORWARD, "no kernel combine_fwd* of this library ran"),
        ("attention", "fwd", ["sm80_xmma_gemm", *OURS], f"sm80_xmma_gemm ran, {FOREIGN}"),
        ("attention", "fwd_bwd", [*OURS], None),
    ],
)
def test_our_kernels_must_have_run_and_nothing_of_a_reference(
    case: str, mode: str, kernels: list[str], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations, "own_kernels", lambda: OURS)
    found = Kernels("nsa").fault(kernels, CASES[case], mode)
    assert (found is None) == (fault is None)
    assert fault is None or fault in str(found)


def test_own_kernels_are_found() -> None:
    found = implementations.own_kernels()
    assert {"range_fwd_kernel", "select_kernel", "combine_bwd_kernel"} <= set(found)
    assert "softmax_step" not in found
    required = {prefix for case in CASES.values() for part in case.kernels for prefix in part}
    for prefix in required - {"selected_"}:
        assert any(name.startswith(prefix) for name in found)


FORWARD, BACKWARD = "pytorch_flash::flash_fwd_kernel", "pytorch_flash::flash_bwd_dq_dk_dv_kernel"
FPROP = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"


@pytest.mark.parametrize(
    ("name", "mode", "kernels", "runs"),
    [
        ("dense-cudnn", "fwd", [FPROP], True),
        ("dense-cudnn", "fwd", [FORWARD], False),
        ("dense-cudnn", "fwd", [], False),
        ("dense-fa2", "fwd", [FORWARD], True),
        ("dense-fa2", "fwd", [FPROP], False),
        ("dense-fa2", "fwd_bwd", [FORWARD], False),
        ("dense-fa2", "fwd_bwd", [FORWARD, BACKWARD], True),
        ("flex", "fwd", ["triton_tem_fused_flex_attention_0"], True),
        ("flex", "fwd", ["triton_poi_fused_0", "nvjet_gemm"], False),
        ("flex", "fwd_bwd", ["triton_tem_fused_0", "triton_poi_fused_0"], False),
        ("flex", "fwd_bwd", ["triton_tem_fused_0", "triton_tem_fused_zeros_1"], True),
        ("reference", "fwd", ["nvjet_gemm"], True),
        ("reference", "fwd", ["nvjet_gemm", "range_fwd_kernel"], False),
        ("reference", "fwd", ["nvjet_gemm", "range_fwd_kernel_compressed"], False),
    ],
)
def test_kernels_of_others_must_have_run(
    name: str,
    mode: str,
    kernels: list[str],
    runs: bool,
) -> None:
    fault = IMPLEMENTATIONS[name].fault(kernels, CASES["attention"], mode)
    assert (fault is None) == runs


@pytest.mark.parametrize(
    ("case", "named", "who"),
    [
        ("attention", False, "nsa dense-cudnn dense-fa2 reference"),
        ("attention", True, "nsa dense-cudnn dense-fa2 flex reference"),
        ("attention.window", False, "nsa flex reference"),
        ("attention.choice", False, "nsa reference"),
        ("attention.selected", True, "nsa tiled gathered reference"),
    ],
)
def test_implementations_take_part_where_they_can(case: str, named: bool, who: str) -> None:
    found = [name for name, each in IMPLEMENTATIONS.items() if each.takes_part(CASES[case], named)]
    assert found == who.split()
    default = implementations.choose_implementations(None, [], torch.device("cuda"))
    assert [each.name for each in default] == [
        "nsa",
        "dense-cudnn",
        "dense-fa2",
        "flex",
        "reference",
    ]


# ---------------------------------------------------------------------------------------- variants


def test_a_variant_changes_tiles_within_its_scope() -> None:
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    names = ("window_attention_fwd", "window_attention_dq", "select_blocks")
    forward, dq, select = usual = [tile_for(name, q, q) for name in names]
    overrides = {"window_*": {"rows": 7}, "*_dq": {"keys": 9}, "other": {"rows": 1}}
    with override_tiles(overrides) as unused:
        found = [tile_for(name, q, q) for name in names]
        assert found == [forward._replace(rows=7), dq._replace(rows=7, keys=9), select]
        assert unused == {"other"}
    assert [tile_for(name, q, q) for name in names] == usual


def test_a_variant_without_effect_gets_no_figure(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Here the reference stands for the kernels: it looks up no tile."""

    def work(self: Kernels, problem: Problem) -> Work:
        tiles = {} if self.variant is None else self.variant.tiles
        made = Reference("reference").work(problem)
        return replace(made, scope=lambda: override_tiles(tiles))

    monkeypatch.setattr(Kernels, "work", work)
    monkeypatch.setattr(Kernels, "backend", "reference")
    monkeypatch.setattr(implementations, "kernels_run_on_cpu", lambda: True)
    window = Variant("pattern", config={"window_size": 64})
    plan = Plan(
        parse_shape("2x1x16x16"),
        [128],
        tokens=128,
        cases=["attention.window"],
        providers=["reference"],
        variants=[Variant("tiles", tiles={"window_*": {"rows": 7}}), window],
        dtype=torch.float32,
        budget_ms=1,
        out=tmp_path / "rows.jsonl",
    )
    assert bench_attention(plan, CPU)
    found = {(row.provider, row.mode): row for row in read_rows([tmp_path / "rows.jsonl"])}
    for mode in ("fwd", "fwd_bwd"):
        assert found["tiles", mode].note == "not run: nothing here looks up a tile for window_*"
        assert found["tiles", mode].ms_p50 is None
        assert found["pattern", mode].correct is True  # compared with a window of 64
        assert found["pattern", mode].variant == {"window_size": 64}
        assert found["reference", mode].variant is None
