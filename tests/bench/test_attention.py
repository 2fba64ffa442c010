"""``nsa bench attention`` and ``consumers`` from their options to their rows, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.errors import TritonError

from nsa import cli
from nsa.bench import attention, clock
from nsa.bench.attention import PROVIDERS, Provider, own_kernels, parse_variant
from nsa.bench.cases import CASES
from nsa.bench.consumers import CONSUMERS
from nsa.bench.rows import Row, read_rows

TINY = "--shape 2x1x16x16 --seqs 128 --tokens 256 --dtype float32"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(clock, "BUDGET_MS", 1.0)


def run(tmp_path: Path, words: str, command: str = "attention") -> tuple[int, list[Row]]:
    """Exit code and rows of the command; rows of earlier calls come first."""
    out = tmp_path / "results" / "rows.jsonl"
    code = cli.main(["bench", command, *f"{TINY} --out {out} {words}".split()])
    return code, read_rows([out])


REFERENCE = "--provider reference"


def test_rows_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "approximates", lambda config: True)
    code, rows = run(tmp_path, f"{REFERENCE} --choice shared16")
    assert code == 0
    cases = [case for case in CASES.values() if "index_loss" not in case.outputs]
    each = [(case.name, mode) for case in cases for mode in case.modes]
    assert [(row.case, row.mode) for row in rows] == each
    for row in rows:
        assert (row.correct, row.choice) == (True, "shared16")
        assert 0 < (row.ms_p20 or 0) <= (row.ms_p50 or 0) <= (row.ms_p80 or 0)
        how = (row.provider, row.timing, row.kernels, row.peak_mib, row.gpu, row.launches)
        assert how == ("reference", "cpu", [], None, None, None)
        assert (row.shape, row.seq_len, row.batch, row.dtype) == ("2x1x16x16", 128, 2, "float32")
        only_moves = row.case in ("attention.compress", "attention.combine")
        assert (row.tflops_useful is None, row.tbps_useful is None) == (only_moves, not only_moves)
        assert row.recall == (1.0 if row.case == "attention.choice" else None)


def test_rows_of_recorded_selections(tmp_path):
    """Of a layer whose queries read the first block and their own."""
    own = np.arange(128, dtype=np.int32) // 64
    blocks = np.full((1, 16, 128), -1, np.int32)
    blocks[0, 0], blocks[0, 1] = 0, np.where(own > 0, own, -1)
    path = tmp_path / "run.npz"
    np.savez(path, layer0=blocks, block_size=np.array(64))
    words = f"{REFERENCE} --case attention.selected --choice random,recorded --recorded {path}"
    code, rows = run(tmp_path, words)
    assert code == 0
    assert [row.choice for row in rows] == ["random", "random", "recorded", "recorded"]
    assert all(row.correct for row in rows)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_ways_to_consume_a_selection(tmp_path):
    code, rows = run(tmp_path, "--choice shared4", "consumers")
    assert code == 0
    each = [(consumer.name, mode) for consumer in CONSUMERS for mode in ("fwd", "fwd_bwd")]
    assert [(row.provider, row.mode) for row in rows] == each
    for row in rows:
        if row.mode == "fwd_bwd" and row.provider in ("mask", "ranges"):
            assert "FlexAttention does not support backward on CPU" in str(row.note)
            continue
        assert row.correct
        results = ["out", "dq", "dk_slc", "dv_slc"]
        assert list(row.errors) == results[: 4 if row.mode != "fwd" else 1]
        assert row.tokens_per_s
        assert list(row.stages_ms or ()) == ["make", "attention"]


def test_a_wrong_result_gets_no_time(tmp_path, monkeypatch, capsys):
    right = Provider.work

    def work(self, problem, mode):
        made, off = right(self, problem, mode), 1.01 if "window" in problem.case.name else 1.0
        return replace(made, forward=lambda: off * made.forward())

    monkeypatch.setattr(Provider, "work", work)
    code, rows = run(tmp_path, f"{REFERENCE} --case attention.window,attention.selected")
    assert code == 1
    assert [row.correct for row in rows] == [False, False, True, True]
    for row in rows[:2]:
        assert (row.ms_p50, row.tflops_useful, row.peak_mib, row.timing) == (None,) * 4
        assert str(row.note).startswith("attention.window out: error 0.0")
    assert "WRONG: attention.window out: error" in capsys.readouterr().out


def test_a_provider_whose_kernel_did_not_run_gets_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Provider, "fault", lambda self, kernels, **_: f"only {kernels} ran")
    monkeypatch.setattr(clock, "profiled", lambda call, device: {"kernels": ["sgemm"]})
    code, rows = run(tmp_path, f"{REFERENCE} --case attention.window")
    assert code == 1
    found = [(row.correct, row.ms_p50, row.note, row.kernels) for row in rows]
    assert found == [(False, None, "only ['sgemm'] ran", ["sgemm"])] * 2


def refuse(error: Exception) -> Any:
    def raises(*_: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize(
    ("provider", "error", "why"),
    [
        ("reference", torch.OutOfMemoryError("CUDA out of memory"), "not run: out of GPU memory"),
        (
            "dense-cudnn",
            RuntimeError("No available kernel.\nmore"),
            "not run: No available kernel.",
        ),
        ("dense-cudnn", TritonError(), "not run: TritonError"),
        ("nsa", RuntimeError("a bug"), None),
        ("reference", RuntimeError("a bug"), None),
    ],
)
def test_what_does_not_run_says_why_unless_it_is_a_bug(
    provider: str,
    error: Exception,
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(attention, "kernels_run_on_cpu", lambda: True)
    monkeypatch.setattr(Provider, "work", refuse(error))
    if why is None:
        with pytest.raises(RuntimeError, match="a bug"):
            run(tmp_path, f"--case attention --provider {provider}")
    else:
        code, rows = run(tmp_path, f"--case attention --provider {provider}")
        assert (code, [row.note for row in rows]) == (0, [why] * 2)


def test_variants():
    found = parse_variant("a-1:window_size=256,branches=[cmp, win],phi=mean")
    pattern = {"window_size": 256, "branches": ["cmp", "win"], "phi": "mean"}
    assert (found.name, found.variant) == ("a-1", pattern)


# --- Mistakes
NO_GPU = "this machine must have a CUDA GPU for"
KNOWN = "nsa, dense-cudnn, dense-fa2, flex, reference"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("attention", f"{NO_GPU} nsa, dense-cudnn, dense-fa2, flex, reference, got none."),
        ("attention --provider fa3", f"--provider must be among {KNOWN}, got 'fa3'."),
        ("attention --choice shared8", "--choice must be among random, shared4, shared16, r"),
        ("attention --choice recorded", "--recorded must be given with choice recorded and only"),
        ("attention --recorded x.npz", "--case must be attention.selected with --recorded, got No"),
        ("consumers --recorded x.npz", "--recorded must be given with choice recorded and only"),
        ("attention --seqs 64 --provider reference", "--seqs must be at least 128, got 64."),
        ("attention --tokens 0", "--tokens must be from 1 to 1,073,741,824, got 0."),
        ("attention --shape sead", "--shape must be one of seed, wide, paper"),
        ("attention --dtype bf16", "argument --dtype: invalid choice: 'bf16'"),
        ("attention --variant nsa:phi=mean", "--variant must have another name than nsa,"),
        ("attention --variant narrow", "--variant must be NAME:KEY=VALUE,.."),
        ("attention --variant narrow:window_sise=3", "The nearest is window_size."),
        ("attention --out r.jsonl --speed 1", "nsa bench attention: unrecognized arguments: --s"),
        ("tune", "nsa: this machine must have a CUDA GPU, got none."),
        ("atention", "nsa bench: unrecognized command: atention; did you mean attention?"),
    ],
)
def test_a_mistake_ends_in_one_line(
    words,
    why,
    monkeypatch,
    capsys,
    tmp_path,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention, "kernels_run_on_cpu", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert why in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())


# --- Kernels that ran
RANGE = ["range_fwd_kernel", "range_dq_kernel", "range_dkv_kernel"]
WHOLE = ["compress_fwd_kernel", "range_fwd_kernel", "select_kernel", "selected_fwd_kernel"]
ALL = [*WHOLE, *RANGE, "compress_dx_kernel", "selected_dq_kernel", "combine_fwd_kernel"]
FORWARD = "pytorch_flash::flash_fwd_kernel"
FLEX, COPY = "triton_tem_fused_flex_attention_0", "at::native::elementwise_kernel"


@pytest.mark.parametrize(
    ("name", "case", "mode", "kernels", "fault"),
    [
        ("nsa", "window", "fwd", [COPY, "triton_tem_range_fwd"], "no kernel with range_fwd in"),
        ("nsa", "window", "fwd_bwd", RANGE[:2], "no kernel with range_dkv in its name ran"),
        ("nsa", "choice", "fwd", ["select_kernel", "triton_poi_add"], "triton_poi_add ran, which"),
        ("nsa", "", "fwd", ["sm80_xmma_gemm", *ALL], "sm80_xmma_gemm ran, which is not of this"),
        ("nsa", "", "fwd_bwd", ALL, None),
        ("nsa", "", "fwd_bwd", ALL[1:-2], "no kernel with compress_fwd in its name ran"),
        ("x:branches=[slc,win]", "", "fwd_bwd", [*ALL[1:-3], *ALL[-2:]], None),
        ("x:branches=[win]", "", "fwd_bwd", [*RANGE, ALL[-1]], None),
        ("x:branches=[slc,win]", "", "fwd", [WHOLE[1], ALL[-1]], "no kernel with select_ in its"),
        ("dense-cudnn", "", "fwd", [FORWARD], "no kernel with cudnn in its name ran"),
        ("dense-fa2", "", "fwd_bwd", [FORWARD], "no kernel with flash_bwd in its name ran"),
        ("flex", "", "fwd_bwd", [FLEX, "triton_poi_fused_0"], "no kernel with triton_tem in its"),
        ("flex", "", "fwd_bwd", [FLEX, "triton_tem_fused_zeros_1"], None),
        ("reference", "", "fwd", ["range_fwd_kernel_compressed"], "ran in the reference"),
    ],
)
def test_the_kernels_of_a_provider_must_have_run(
    name: str, case: str, mode: str, kernels: list[str], fault: str | None
) -> None:
    measured = CASES[f"attention.{case}" if case else "attention"]
    provider = PROVIDERS.get(name) or parse_variant(name)
    found = provider.fault(kernels, measured, mode)
    assert found is None if fault is None else fault in str(found)


def test_own_kernels_are_found():
    assert "softmax_step" not in own_kernels()
    for part in {part for case in CASES.values() for parts in case.kernels for part in parts}:
        assert any(part in name for name in own_kernels())
