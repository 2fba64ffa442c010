"""`nsa bench attention` from its options to its rows, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from nsa import cli
from nsa.bench import attention, implementations
from nsa.bench.cases import CASES, Problem
from nsa.bench.implementations import (
    IMPLEMENTATIONS,
    Kernels,
    PyTorch,
    Reference,
    Work,
    override_tiles,
)
from nsa.bench.points import (
    RECORDED,
    Point,
    given_selection,
    hand_made_selection,
    parse_shape,
)
from nsa.bench.rows import Row, read_rows
from nsa.errors import UserError
from nsa.lm.recorded import load_selections, save_selections
from nsa.ops._triton.tuning import tile_for

TINY = "--shape 2x1x16x16 --seqs 128 --tokens 256 --dtype float32 --budget-ms 1"


def run(tmp_path: Path, words: str = "", provider: str = "reference") -> tuple[int, list[Row]]:
    """Exit code and rows of the command; rows of earlier calls come first."""
    out = tmp_path / "results" / "rows.jsonl"
    options = f"{TINY} --provider {provider} --out {out} {words}"
    code = cli.main(["bench", "attention", *options.split()])
    return code, read_rows([out])


def test_recorded_selections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sequence gets those of the next layer; nothing else may be measured with them."""
    device = torch.device("cpu")
    shape = parse_shape("2x1x16x16")
    config = shape.config()
    layers = []
    for batch in (1, 2):
        random = Point(shape, 200, batch, "random", torch.float32, device)
        layers.append(hand_made_selection(random, config)[-1])
    file = tmp_path / "blocks.npz"
    save_selections(file, layers, config.block_size)
    found, block_size = load_selections(file)
    assert block_size == config.block_size
    assert all(torch.equal(a, b) for a, b in zip(found, layers, strict=True))
    point = Point(shape, 128, 3, RECORDED, torch.float32, device, file)
    selection = given_selection(point, config)
    assert [torch.equal(selection[b], layers[b % 2][:128]) for b in range(3)] == [True] * 3

    words = f"--choice random,recorded --recorded {file}"
    code, rows = run(tmp_path, f"{words} --case attention.selected")
    assert (code, [row.choice for row in rows]) == (0, ["random"] * 2 + ["recorded"] * 2)
    assert all(row.correct for row in rows)
    (tmp_path / "no.npz").write_bytes(b"PK")
    refused = (
        (words, "--case must be attention.selected for recorded selections"),
        ("--choice recorded --case attention.selected", "--recorded must be given"),
        (f"{words}x --case attention.selected", "--recorded must be a file of nsa inspect"),
        (
            f"--choice recorded --recorded {tmp_path / 'no.npz'} --case attention.selected",
            "--recorded must be a file of nsa inspect",
        ),
    )
    for more, answer in refused:
        assert run(tmp_path, more)[0] == 2
        assert answer in capsys.readouterr().err
    of_a_longer = replace(point, seq_len=256)
    with pytest.raises(UserError, match="--seqs must be at most the recorded tokens, got 256 of"):
        given_selection(of_a_longer, config)
    with pytest.raises(UserError, match=r"hold \(2, 16, 64\) KV heads"):
        given_selection(point, replace(config, num_heads=4, num_kv_heads=2))


def test_the_reference_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = run(tmp_path)
    assert code == 0
    expected = [(case.name, mode) for case in CASES.values() for mode in case.modes]
    assert [(row.case, row.mode) for row in rows] == expected
    assert len({row.run_id for row in rows}) == 1
    for row in rows:
        assert row.correct is True
        times = [row.ms_p20 or 0, row.ms_p50 or 0, row.ms_p80 or 0]
        assert times[0] > 0
        assert times == sorted(times)
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
    _, rows = run(tmp_path, "--case attention.choice,attention --choice shared16,random --recall")
    each = [("attention.choice", "fwd", 1.0), *(("attention", m, None) for m in ("fwd", "fwd_bwd"))]
    assert [(row.case, row.mode, row.recall) for row in rows] == each * 2
    assert [row.choice for row in rows] == ["shared16"] * 3 + ["random"] * 3


def test_a_wrong_result_gets_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Reference.work

    def work(self: Reference, problem: Problem) -> Work:
        made, off = right(self, problem), 1.01 if problem.case.name == "attention.window" else 1.0
        return replace(made, forward=lambda: tuple(off * out for out in made.forward()))

    monkeypatch.setattr(Reference, "work", work)
    code, rows = run(tmp_path, "--case attention.window,attention.combine")
    assert code == 1
    assert [row.correct for row in rows] == [False, False, True, True]
    for row in rows[:2]:
        assert (row.ms_p50, row.tflops_useful, row.peak_mib, row.timing) == (None,) * 4
        assert str(row.note).startswith("attention.window out: error 0.0")
    assert "WRONG: attention.window out: error" in capsys.readouterr().out


def test_an_implementation_whose_kernel_did_not_run_gets_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reference, "fault", lambda self, kernels, *_: f"only {kernels} ran")
    monkeypatch.setattr(attention, "kernel_times", lambda call, device: {"sgemm": 1.0})
    monkeypatch.setattr(attention, "judges_kernels", lambda device: True)
    code, rows = run(tmp_path, "--case attention.window")
    assert code == 1
    found = [(row.correct, row.ms_p50, row.note, row.kernels) for row in rows]
    assert found == [(False, None, "only ['sgemm'] ran", ["sgemm"])] * 2


def refuse(error: Exception) -> Any:
    def raises(*_: Any) -> Any:
        raise error

    return raises


def test_what_does_not_run_says_why_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementations, "free_gib", lambda device: 1e-6)
    code, rows = run(tmp_path, "--case attention.window,attention.combine")
    assert code == 0
    assert [row.correct for row in rows] == [None, None, True, True]
    assert str(rows[0].note).startswith("not run: the reference would need about 0 GiB")
    monkeypatch.setattr(Work, "run", refuse(torch.OutOfMemoryError("CUDA out of memory")))
    _, rows = run(tmp_path, "--case attention.combine")
    assert [row.note for row in rows[-2:]] == ["not run: out of GPU memory"] * 2
    monkeypatch.setattr(Work, "run", refuse(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path, "--case attention.combine")


TOO_LARGE = OutOfResources(300_000, 232_448, "shared memory")


@pytest.mark.parametrize(
    ("kind", "error", "why"),
    [
        (PyTorch, RuntimeError("No available kernel.\nmore"), "not run: No available kernel."),
        (PyTorch, TritonError(), "not run: TritonError"),
        (Kernels, TOO_LARGE, "not run: out of resource: shared memory, Required: 300000, Hardware"),
    ],
)
def test_what_is_not_supported_here_is_said(
    kind: type, error: Exception, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PyTorch that has no kernel or does not compile, and a variant whose tile does not fit."""
    monkeypatch.setattr(implementations, "kernels_run_on_cpu", lambda: True)
    monkeypatch.setattr(Kernels, "work", refuse(TOO_LARGE))
    monkeypatch.setattr(kind, "work", refuse(error))
    code, rows = run(tmp_path, "--case attention --variant large:*.rows=256", "dense-cudnn")
    assert code == 0
    provider = "large" if kind is Kernels else "dense-cudnn"
    notes = [str(row.note) for row in rows if row.provider == provider]
    assert [note.startswith(why) for note in notes] == [True] * 2
    with pytest.raises(OutOfResources):
        run(tmp_path, "--case attention", "nsa")


# --- Mistakes
NO_GPU = "this machine must have a CUDA GPU for"
KNOWN = "nsa, dense-cudnn, dense-fa2, flex, tiled, gathered, reference"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("attention", f"{NO_GPU} nsa, dense-cudnn, dense-fa2, flex, reference, got none."),
        ("attention --provider reference --variant a:phi=mean", f"{NO_GPU} reference, a, got none"),
        ("attention --provider fa3", f"--provider must be among {KNOWN}, got 'fa3'."),
        ("attention --case attention.windows", "--case must be among attention, "),
        (
            "attention --choice shared8",
            "--choice must be among random, shared4, shared16, rec",
        ),
        ("attention --seqs 2048,0", "--seqs must be lengths from 1 to"),
        ("attention --seqs 64 --provider reference", "--seqs must be at least 128, got 64."),
        ("attention --tokens 0", "--tokens must be from 1 to 1,073,741,824, got 0."),
        ("attention --shape sead", "--shape must be one of seed, wide, paper"),
        ("attention --dtype bf16", "argument --dtype: invalid choice: 'bf16'"),
        ("attention --variant nsa:phi=mean", "--variant must have another name than nsa,"),
        ("attention --out r.jsonl --speed 1", "nsa bench attention: unrecognized arguments: --s"),
        ("tune", "nsa: this machine must have a CUDA GPU, got none."),
        ("atention", "nsa bench: unrecognized command: atention; did you mean attention?"),
    ],
)
def test_a_mistake_ends_in_one_line(
    words: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(implementations, "kernels_run_on_cpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert why in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())


# --- Whose kernels have run
RANGE = ["range_fwd_kernel", "range_dq_kernel", "range_dkv_kernel"]
WHOLE = ["compress_fwd_kernel", "range_fwd_kernel", "select_kernel", "selected_fwd_kernel"]
ALL = [*WHOLE, *RANGE, "compress_dx_kernel", "combine_fwd_kernel", "combine_bwd_kernel"]
FORWARD, BACKWARD = "pytorch_flash::flash_fwd_kernel", "pytorch_flash::flash_bwd_dq_dk_dv_kernel"
FPROP = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"
FLEX, COPY = "triton_tem_fused_flex_attention_0", "at::native::elementwise_kernel"


@pytest.mark.parametrize(
    ("name", "case", "mode", "kernels", "fault"),
    [
        ("nsa", "window", "fwd", [RANGE[0], COPY], None),
        ("nsa", "window", "fwd", ["range_fwd_kernel_window"], None),
        ("nsa", "window", "fwd", [COPY, "triton_tem_range_fwd"], "no kernel range_fwd* of this"),
        ("nsa", "window", "fwd_bwd", RANGE[:2], "no kernel range_dkv* of this library ran"),
        ("nsa", "window", "fwd_bwd", RANGE, None),
        ("nsa", "choice", "fwd", ["selected_fwd_kernel"], "no kernel select_* of this library"),
        ("nsa", "choice", "fwd", ["select_kernel", "nvjet_hsh"], "nvjet_hsh ran, which is not"),
        ("nsa", "choice", "fwd", ["select_kernel", "triton_poi_add"], "triton_poi_add ran, which"),
        ("nsa", "", "fwd", WHOLE, "no kernel combine_fwd* of this library ran"),
        ("nsa", "", "fwd", ["sm80_xmma_gemm", *ALL], "sm80_xmma_gemm ran, which is not of this"),
        ("nsa", "", "fwd_bwd", ALL, None),
        ("dense-cudnn", "", "fwd", [FPROP], None),
        ("dense-cudnn", "", "fwd", [FORWARD], "no kernel with cudnn in its name ran"),
        ("dense-fa2", "", "fwd", [FPROP], "no kernel with flash_fwd in its name ran"),
        ("dense-fa2", "", "fwd_bwd", [FORWARD], "no kernel with flash_bwd in its name ran"),
        ("dense-fa2", "", "fwd_bwd", [FORWARD, BACKWARD], None),
        ("flex", "", "fwd", [FLEX], None),
        ("flex", "", "fwd_bwd", [FLEX, "triton_poi_fused_0"], "no kernel with triton_tem in its"),
        ("flex", "", "fwd_bwd", [FLEX, "triton_tem_fused_zeros_1"], None),
        ("reference", "", "fwd", ["nvjet_gemm"], None),
        ("reference", "", "fwd", ["range_fwd_kernel_compressed"], "ran in the reference"),
    ],
)
def test_the_kernels_of_an_implementation_must_have_run(
    name: str, case: str, mode: str, kernels: list[str], fault: str | None
) -> None:
    measured = CASES[f"attention.{case}" if case else "attention"]
    found = IMPLEMENTATIONS[name].fault(kernels, measured, mode)
    assert found is None if fault is None else fault in str(found)


def test_own_kernels_are_found() -> None:
    found = implementations.own_kernels()
    assert "softmax_step" not in found
    required = {prefix for case in CASES.values() for part in case.kernels for prefix in part}
    for prefix in required - {"selected_"}:
        assert any(name.startswith(prefix) for name in found)


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


# --- Variants
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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here the reference stands for the kernels: it looks up no tile."""
    monkeypatch.setattr(Kernels, "work", Reference.work)
    monkeypatch.setattr(Kernels, "backend", "reference")
    monkeypatch.setattr(implementations, "kernels_run_on_cpu", lambda: True)
    variants = "--variant tiles:window_*.rows=7 --variant pattern:window_size=64"
    code, rows = run(tmp_path, f"--case attention.window {variants}")
    assert code == 0
    for reference, tiles, pattern in (rows[::2], rows[1::2]):
        assert tiles.note == "not run: nothing here looks up a tile for window_*"
        assert tiles.ms_p50 is None
        assert pattern.correct is True  # compared with a window of 64
        assert (reference.variant, pattern.variant) == (None, {"window_size": 64})
