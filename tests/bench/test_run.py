"""`nsa bench attention` from its words to its rows, on the CPU."""

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
from nsa.bench import attention, providers
from nsa.bench.attention import Plan, bench_attention, useful_bytes
from nsa.bench.cases import CASES
from nsa.bench.points import parse_shape
from nsa.bench.providers import PROVIDERS, Dense, Flex, Ours, Reference, Work, override_tiles
from nsa.bench.rows import Row, read_rows
from nsa.bench.variants import Variant
from nsa.ops._triton.tuning import tile_for

TINY = ["--shape", "2x1x16x16", "--seqs", "128", "--tokens", "256", "--provider", "reference", "--dtype", "float32"]
QUICK = ["--budget-ms", "1"]


def run(tmp_path: Path, *words: str) -> tuple[int, list[Row]]:
    out = tmp_path / "results" / "rows.jsonl"
    code = cli.main(["bench", "attention", *TINY, *QUICK, "--out", str(out), *words])
    return code, read_rows([out])


def test_the_reference_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = run(tmp_path)
    assert code == 0
    assert [(row.case, row.mode) for row in rows] == [(case.name, mode) for case in CASES.values() for mode in case.modes]
    assert len({row.run_id for row in rows}) == 1
    for row in rows:
        assert row.correct is True
        assert row.ms_p50 is not None
        assert row.ms_p20 is not None
        assert row.ms_p80 is not None
        assert 0 < row.ms_p20 <= row.ms_p50 <= row.ms_p80
        assert (row.provider, row.timing, row.kernels, row.peak_mib, row.gpu) == ("reference", "cpu", [], None, None)
        assert (row.shape, row.choice, row.seq_len, row.batch, row.dtype) == ("2x1x16x16", "random", 128, 2, "float32")
        assert (row.tflops_useful is None) != (row.tbps_useful is None)
        assert row.samples is not None
        assert row.samples >= 3
    said = capsys.readouterr().out
    assert "S 128 x 2, choice random" in said
    assert len([line for line in said.splitlines() if line.startswith("attention.window")]) == 2


def test_the_words_choose_what_is_measured(tmp_path: Path) -> None:
    words = ["--case", "attention.choice,attention", "--choice", "shared16,random", "--recall"]
    code, rows = run(tmp_path, *words)
    assert code == 0
    whole, choice = ("attention", "fwd"), ("attention.choice", "fwd")
    assert [(row.case, row.mode) for row in rows] == [choice, whole, ("attention", "fwd_bwd")] * 2
    assert [row.choice for row in rows] == ["shared16"] * 3 + ["random"] * 3
    assert [row.recall for row in rows] == [1.0, None, None] * 2
    assert [row.overlap is None for row in rows] == [False] * 3 + [True] * 3
    assert rows[0].overlap == pytest.approx(1.0, abs=0.02)


class Wrong(Reference):
    """The reference, a little off where it is told to be."""

    def work(self, case: Any, tensors: Any, point: Any, config: Any) -> Work:
        work = super().work(case, tensors, point, config)

        def forward() -> tuple[Tensor, ...]:
            return tuple(1.01 * out for out in work.forward())

        return replace(work, forward=forward) if case.name == "attention.window" else work


def test_a_wrong_result_gets_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROVIDERS, "reference", Wrong("reference"))
    code, rows = run(tmp_path, "--case", "attention.window,attention.combine")
    assert code == 1
    assert [row.correct for row in rows] == [False, False, True, True]
    for row in rows[:2]:
        assert (row.ms_p50, row.ms_p20, row.ms_p80, row.tflops_useful, row.peak_mib, row.timing) == (None,) * 6
        assert row.note is not None
        assert row.note.startswith("attention.window out: error 0.0")
    said = capsys.readouterr().out
    assert not [line for line in said.splitlines() if "attention.window" in line and " ms" in line]
    assert "WRONG: attention.window out: error" in said


def test_a_provider_whose_kernel_did_not_run_gets_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fault(self: Reference, kernels: Any, case: Any, mode: str) -> str:
        seen.append(list(kernels))
        return "no kernel of its own ran"

    monkeypatch.setattr(Reference, "fault", fault)
    monkeypatch.setattr(attention, "kernel_times", lambda call, device: {"sgemm": 1.0})
    monkeypatch.setattr(attention, "judges_kernels", lambda device: True)
    code, rows = run(tmp_path, "--case", "attention.window")
    assert code == 1
    assert seen == [["sgemm"], ["sgemm"]]
    assert len(rows) == 2
    for row in rows:
        assert (row.correct, row.ms_p50, row.note) == (False, None, "no kernel of its own ran")
        assert row.kernels == ["sgemm"]


def test_what_does_not_run_says_why_and_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "free_gib", lambda device: 1e-6)
    code, rows = run(tmp_path, "--case", "attention.window,attention.combine")
    assert code == 0
    assert [row.correct for row in rows] == [None, None, True, True]
    assert str(rows[0].note).startswith("not run: the reference would need about 0 GiB")

    def too_much(self: Work, mode: str) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Work, "run", too_much)
    _, rows = run(tmp_path, "--case", "attention.combine")
    assert [row.note for row in rows[-2:]] == ["not run: out of GPU memory"] * 2


def test_a_bug_of_ours_is_not_taken_for_something_unsupported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(self: Work, mode: str) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Work, "run", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path, "--case", "attention.combine")


def test_what_others_do_not_support_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dense attention that has no kernel here, FlexAttention that does not compile, a tile that does not fit."""

    def refuse(error: Exception) -> Callable[..., Any]:
        def work(*_: Any) -> Work:
            raise error

        return work

    monkeypatch.setattr(providers, "kernels_run_on_cpu", lambda: True)
    monkeypatch.setattr(Dense, "work", refuse(RuntimeError("No available kernel. Aborting execution.\nmore")))
    monkeypatch.setattr(Flex, "work", refuse(TritonError()))
    monkeypatch.setattr(Ours, "work", refuse(OutOfResources(300_000, 232_448, "shared memory")))
    words = [*QUICK, "--shape", "2x1x16x16", "--seqs", "128", "--provider", "dense-cudnn,flex", "--case", "attention"]
    out = tmp_path / "rows.jsonl"
    assert cli.main(["bench", "attention", *words, "--variant", "large:*.rows=256", "--out", str(out)]) == 0
    assert [row.note for row in read_rows([out])[::2]] == [
        "not run: No available kernel. Aborting execution.",
        "not run: TritonError",
        "not run: out of resource: shared memory, Required: 300000, Hardware limit: 232448. Reducing block sizes or "
        "`num_stages` may help.",
    ]
    with pytest.raises(OutOfResources):
        cli.main(["bench", "attention", *words[:-4], "--provider", "nsa", "--case", "attention"])


# ------------------------------------------------------------------------------------------------ mistakes in the words


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(providers, "kernels_run_on_cpu", lambda: False)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "this machine must have a CUDA GPU for nsa, dense-cudnn, dense-fa2, flex, reference, got none."),
        (["--provider", "reference,flex"], "must have a CUDA GPU for reference, flex, got none."),
        (["--provider", "reference", "--variant", "a:phi=mean"], "must have a CUDA GPU for reference, a, got none."),
        (
            ["--provider", "fa3"],
            "--provider must be among nsa, dense-cudnn, dense-fa2, flex, mask, ranges, gather, tiled, gathered, reference, "
            "got 'fa3'.",
        ),
        (["--case", "attention.windows"], "--case must be among attention, "),
        (["--choice", "shared8"], "--choice must be among random, shared4, shared16, got 'shared8'."),
        (["--seqs", "2k"], "--seqs must be positive lengths"),
        (["--seqs", "2048,0"], "--seqs must be positive lengths"),
        (["--seqs", "64", "--provider", "reference"], "--seqs must be at least 128, got 64."),
        (["--tokens", "0"], "--tokens must be positive, got 0."),
        (["--shape", "sead"], "--shape must be one of seed, wide, paper"),
        (["--dtype", "bf16"], "--dtype must be one of bfloat16, float16, float32, got 'bf16'."),
        (["--variant", "nsa:phi=mean"], "the name must be none of nsa,"),
        (["--variant", "a:phi=mean", "--variant", "a:phi=mean"], "the name must be none of nsa,"),
        (["--out", "rows.jsonl", "--speed", "1"], "nsa bench attention: unrecognized arguments: --speed"),
    ],
)
def test_a_mistake_ends_in_one_line(
    words: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without_gpu(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "attention", *words]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert why in said.err
    assert not said.out
    assert not list(tmp_path.iterdir())


def test_tuning_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without_gpu(monkeypatch)
    assert cli.main(["bench", "tune"]) == 2
    assert "nsa bench tune: this machine must have a CUDA GPU, got none." in capsys.readouterr().err


def test_bench_without_a_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    assert "report" in capsys.readouterr().out
    assert cli.main(["bench", "atention"]) == 2
    assert "nsa bench: unrecognized command: atention; did you mean attention?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["attention", "tune", "report"])
def test_help_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", command, "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    for action in cli._parsers().commands["bench"].commands[command]._actions:
        assert action.help, action.dest
        assert (action.option_strings[-1] if action.option_strings else str(action.metavar)) in said


# ---------------------------------------------------------------------------------------------- whose kernels have run

OURS = dict.fromkeys((
    "compress_fwd_kernel", "compress_dx_kernel", "range_fwd_kernel", "range_dq_kernel", "range_dkv_kernel", "select_kernel",
    "selected_fwd_kernel", "combine_fwd_kernel", "combine_bwd_kernel",
))  # fmt: skip
COPY = "at::native::elementwise_kernel"


@pytest.mark.parametrize(
    ("case", "mode", "kernels", "fault"),
    [
        ("attention.window", "fwd", ["range_fwd_kernel", COPY], None),
        ("attention.window", "fwd", ["range_fwd_kernel_window", COPY], None),
        ("attention.window", "fwd", [COPY], "no kernel range_fwd* of this library ran"),
        ("attention.window", "fwd", ["triton_tem_range_fwd"], "no kernel range_fwd* of this library ran"),
        ("attention.window", "fwd_bwd", ["range_fwd_kernel", "range_dq_kernel"], "no kernel range_dkv* of this library ran"),
        ("attention.window", "fwd_bwd", ["range_fwd_kernel", "range_dq_kernel", "range_dkv_kernel"], None),
        ("attention.choice", "fwd", ["selected_fwd_kernel"], "no kernel select_* of this library ran"),
        ("attention.choice", "fwd", ["select_kernel", "nvjet_hsh_64x8"], "nvjet_hsh_64x8 ran, which is not of this library"),
        ("attention.choice", "fwd", ["select_kernel", "void cutlass::Kernel2"], "void cutlass::Kernel2 ran, which is not"),
        ("attention.choice", "fwd", ["select_kernel", "triton_poi_fused_add_0"], "triton_poi_fused_add_0 ran, which is not"),
        ("attention", "fwd", sorted(OURS.keys() - {"combine_fwd_kernel"}), "no kernel combine_fwd* of this library ran"),
        ("attention", "fwd", ["sm80_xmma_gemm_bf16", *OURS], "sm80_xmma_gemm_bf16 ran, which is not of this library"),
        ("attention", "fwd_bwd", sorted(OURS), None),
    ],
)  # fmt: skip
def test_ours_must_have_run_and_nothing_of_a_reference(
    case: str, mode: str, kernels: list[str], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "own_kernels", lambda: OURS)
    found = Ours("nsa").fault(kernels, CASES[case], mode)
    assert (found is None) == (fault is None)
    assert fault is None or fault in str(found)


def test_own_kernels_are_found() -> None:
    found = providers.own_kernels()
    assert {"range_fwd_kernel", "range_dkv_kernel", "select_kernel", "compress_fwd_kernel", "combine_bwd_kernel"} <= set(found)
    assert "softmax_step" not in found
    required = {prefix for case in CASES.values() for part in case.kernels for prefix in part} - {"selected_"}
    assert all(any(name.startswith(prefix) for name in found) for prefix in required)


CUDNN, FLASH = PROVIDERS["dense-cudnn"], PROVIDERS["dense-fa2"]
FORWARD, BACKWARD = "pytorch_flash::flash_fwd_kernel", "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel"
FPROP = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"


@pytest.mark.parametrize(
    ("provider", "mode", "kernels", "runs"),
    [
        (CUDNN, "fwd", [FPROP], True),
        (CUDNN, "fwd", [FORWARD], False),
        (CUDNN, "fwd", [], False),
        (FLASH, "fwd", [FORWARD], True),
        (FLASH, "fwd", [FPROP], False),
        (FLASH, "fwd_bwd", [FORWARD], False),
        (FLASH, "fwd_bwd", [FORWARD, BACKWARD], True),
        (Flex("flex"), "fwd", ["triton_tem_fused_flex_attention_0"], True),
        (Flex("flex"), "fwd", ["triton_poi_fused_0", "nvjet_gemm"], False),
        (Flex("flex"), "fwd_bwd", ["triton_tem_fused_0", "triton_poi_fused_0"], False),
        (Flex("flex"), "fwd_bwd", ["triton_tem_fused_0", "triton_tem_fused_zeros_1"], True),
        (Reference("reference"), "fwd", ["nvjet_gemm"], True),
        (Reference("reference"), "fwd", ["nvjet_gemm", "range_fwd_kernel"], False),
        (Reference("reference"), "fwd", ["nvjet_gemm", "range_fwd_kernel_compressed"], False),
    ],
)
def test_others_must_have_run(provider: Any, mode: str, kernels: list[str], runs: bool) -> None:
    assert (provider.fault(kernels, CASES["attention"], mode) is None) == runs


def test_providers_take_part_where_they_can() -> None:
    def who(case: str, named: bool) -> list[str]:
        return [name for name, each in PROVIDERS.items() if providers.takes_part(each, CASES[case], named)]

    assert who("attention", False) == ["nsa", "dense-cudnn", "dense-fa2", "reference"]
    assert who("attention", True) == ["nsa", "dense-cudnn", "dense-fa2", "flex", "reference"]
    assert who("attention.window", False) == ["nsa", "flex", "reference"]
    assert who("attention.choice", False) == ["nsa", "reference"]
    assert who("attention.selected", True) == ["nsa", "mask", "ranges", "gather", "tiled", "gathered", "reference"]
    default = providers.choose_providers(None, [], torch.device("cuda"))
    assert [each.name for each in default] == ["nsa", "dense-cudnn", "dense-fa2", "flex", "reference"]
    assert isinstance(CUDNN, Dense)
    assert isinstance(FLASH, Dense)
    assert CUDNN.sdpa != FLASH.sdpa


# ------------------------------------------------------------------------------------------------------------ variants


def test_a_variant_changes_tiles_within_its_scope() -> None:
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    names = ("window_attention_fwd", "window_attention_dq", "select_blocks")
    usual = [tile_for(name, q, q) for name in names]
    with override_tiles({"window_*": {"rows": 7}, "*_dq": {"keys": 9}, "other": {"rows": 1}}) as unused:
        assert [tile_for(name, q, q) for name in names] == [
            usual[0]._replace(rows=7), usual[1]._replace(rows=7, keys=9), usual[2],
        ]  # fmt: skip
        assert unused == {"other"}
    assert [tile_for(name, q, q) for name in names] == usual


@pytest.fixture
def reference_as_ours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Ours, computed by the reference, which looks no tile up unless it is told to."""

    def work(self: Ours, case: Any, tensors: Any, point: Any, config: Any) -> Work:
        made = Reference("reference").work(case, tensors, point, config)
        variant = self.variant
        assert variant is not None
        return replace(made, scope=lambda: override_tiles(variant.tiles))

    monkeypatch.setattr(Ours, "work", work)
    monkeypatch.setattr(Ours, "backend", "reference")
    monkeypatch.setattr(providers, "kernels_run_on_cpu", lambda: True)
    return work


def test_a_variant_without_effect_gets_no_figure(reference_as_ours: object, tmp_path: Path) -> None:
    variants = [
        Variant("tiles", tiles={"window_*": {"rows": 7}}),
        Variant("pattern", config={"window_size": 64}),
    ]
    plan = Plan(
        parse_shape("2x1x16x16"), [128], tokens=128, cases=["attention.window"], providers=["reference"], variants=variants,
        dtype=torch.float32, budget_ms=1, out=tmp_path / "rows.jsonl",
    )  # fmt: skip
    assert bench_attention(plan, torch.device("cpu"))
    found = {(row.provider, row.mode): row for row in read_rows([tmp_path / "rows.jsonl"])}
    for mode in ("fwd", "fwd_bwd"):
        assert found["tiles", mode].note == "not run: nothing here looks up a tile for window_*"
        assert found["tiles", mode].ms_p50 is None
        assert found["pattern", mode].correct is True  # compared with a window of 64
        assert found["pattern", mode].variant == {"window_size": 64}
        assert found["reference", mode].variant is None


def test_useful_bytes_count_each_tensor_as_often_as_it_must_move() -> None:
    x = {"k_cmp_raw": torch.zeros(10), "v_cmp_raw": torch.zeros(10), "dk_cmp": torch.zeros(3), "dv_cmp": torch.zeros(3)}
    assert useful_bytes(CASES["attention.compress"], x, backward=False) == 4 * 26
    assert useful_bytes(CASES["attention.compress"], x, backward=True) == 4 * 52
    names = ("out_cmp", "out_slc", "out_win", "gates", "dout")
    x = {name: torch.zeros(8) for name in names}
    assert useful_bytes(CASES["attention.combine"], x, backward=False) == 4 * 8 * 5
    assert useful_bytes(CASES["attention.combine"], x, backward=True) == 4 * 8 * (5 + 1 + 4 + 4)
