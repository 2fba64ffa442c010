"""The report is made from rows alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from nsa import cli
from nsa.bench.report import crossover, fitted_exponent, kernel_kinds, largest_batches, newest_rows, series, write_report
from nsa.bench.rows import Row, RowFile
from nsa.errors import UserError
from tests.bench.rows import make_row

H200 = {"gpu": "NVIDIA H200"}


def rows() -> list[Row]:
    """Dense attention grows with S, ours does not and is twice as slow at 2,048."""
    made = []
    for seq_len, dense, ours in ((2048, 1.0, 2.0), (8192, 4.0, 2.0), (65_536, 32.0, 2.0)):
        for mode, factor in (("fwd", 1.0), ("fwd_bwd", 3.0)):
            point = {"seq_len": seq_len, "batch": 65_536 // seq_len, "mode": mode, **H200}
            made.append(make_row(**point, provider="dense-cudnn", ms_p50=factor * dense, peak_mib=100.0))
            made.append(make_row(**point, ms_p50=factor * ours, peak_mib=300.0))
    window = make_row(**H200, case="attention.window", ms_p50=0.5)
    red = make_row(
        **H200, case="attention.window", mode="fwd_bwd", correct=False, ms_p50=None, ms_p20=None, ms_p80=None, note="dq: wrong"
    )
    return [*made, window, red]


def test_report(tmp_path: Path) -> None:
    path = write_report(rows(), tmp_path / "new")
    text = path.read_text()
    assert "## seed, choice random, bfloat16, NVIDIA H200" in text
    assert "| nsa | 65,536 | 1 | fwd | 2 (0.9 to 1.1) | 100 |  | 300 | 0.0625 | 0.0625 of dense-cudnn: must 0.32 pass" in text
    assert "nsa becomes faster than dense-cudnn at S = 4,096, forward." in text
    assert "| dense-cudnn | forward | 1.00 |" in text
    assert "| nsa | forward + backward | 0.00 |" in text
    assert "attention.window, nsa, seed, random, S 2,048, fwd: 0.5: must 0.36 FAIL, goal 0.28 FAIL" in text
    assert "- attention.window, nsa, seed, random, S 2,048, fwd_bwd: dq: wrong" in text
    assert "| run | NVIDIA H200 | 1 | 2.11.0 | 3.6.0 | abc | 2026-01-02T03:04:05+00:00 |" in text
    plots = sorted(file.name for file in path.parent.glob("*.png"))
    assert plots == [f"{kind}-seed-random-bfloat16-nvidia-h200.png" for kind in ("memory", "ratio", "time")]
    assert all(f"]({name})" in text for name in plots)
    assert all((path.parent / name).read_bytes()[:4] == b"\x89PNG" for name in plots)


def test_what_approximate_patterns_find(tmp_path: Path) -> None:
    exact = make_row(**H200, case="attention.choice", provider="nsa", recall=1.0)
    two_stages = make_row(**H200, case="attention.choice", provider="coarse", recall=0.73, variant={"coarse_block_size": 256})
    text = write_report([exact, two_stages], tmp_path).read_text()
    assert "| of dense | recall | differs | target |" in text
    assert "|  | 0.730 | coarse_block_size 256 |  |" in text


def test_report_of_training(tmp_path: Path) -> None:
    made = []
    for seq_len, dense, ours in ((2048, 100.0, 150.0), (65_536, 700.0, 200.0)):
        point = {"case": "train", "choice": "model", "seq_len": seq_len, "batch": 65_536 // seq_len, "mode": "fwd_bwd", **H200}
        for provider, ms in (("dense", dense), ("nsa", ours)):
            speed = 65_536_000 / ms
            memory = {"peak_mib": 3 * ms, "reserved_mib": 4 * ms, "loss_nats": 2.5}
            made.append(make_row(**point, provider=provider, ms_p50=ms, tokens_per_s=speed, mfu=speed / 1e6, **memory))
    made.append(make_row(**point, provider="late", ms_p50=400.0, tokens_per_s=163_840.0, variant={"optim.lr": 0.1}))
    text = write_report(made, tmp_path).read_text()
    assert "## seed, choice model, bfloat16, NVIDIA H200" in text
    assert (
        "| nsa | 2,048 | 32 | fwd_bwd | 150 (0.9 to 1.1) | 436,907 | 0.437 | 450 | 600 | 1.5 void | 1.5 | 2.500 |  "
        "| 436,907 tokens/s: must 430,000 pass, goal 550,000 FAIL; 1.5 MiB of dense: must 1.5 pass |"
    ) in text
    assert (
        "| late | 65,536 | 1 | fwd_bwd | 400 (0.9 to 1.1) | 163,840 |  | 64 |  | 0.571 | 0.0305 |  | optim.lr 0.1 |  |" in text
    )
    plots = sorted(file.name for file in tmp_path.glob("*.png"))
    assert plots == [f"train-{kind}-seed-model-bfloat16-nvidia-h200.png" for kind in ("memory", "mfu", "ratio", "speed")]
    assert all(f"]({name})" in text for name in plots)
    assert "- missed: train, dense, seed, model, S 2,048, fwd_bwd: 655,360 tokens/s: must 660,000 FAIL" in text
    assert "| late | 65,536 | 1 |  |  |  | 0.0 |  |  |  |  | 0.0 |" in text


def test_runs_of_documents_have_a_section_and_say_how_they_went(tmp_path: Path) -> None:
    point = {"case": "train", "choice": "model", "mode": "fwd_bwd", "tokens_per_s": 1e5, **H200}
    masked = {"settings": {"document_mask": True}, "changed": {"micro_batch": 32, "loss_chunk": 64}}
    went = {"slowest_over_median": 1.5, "compilations_after_5": 2, "host_ms_p50": 9.0}
    made = [
        make_row(**point, ms_p50=150.0),
        make_row(**point, **masked, **went, ms_p50=160.0, first_step_s=30.0),
        make_row(**point, provider="dense-unmasked", ms_p50=80.0, changed={}),
    ]
    text = write_report(made, tmp_path).read_text()
    whole = text.index("## seed, choice model, bf")
    documents = text.index("## seed, choice model, document masks, bf")
    assert whole < documents
    row = "| nsa | 2,048 | 32 | 2.000 | 2 | 1.50 | 9.0 | 30.0 | micro_batch 32, loss_chunk 64 |"
    assert row in text[documents:]
    assert "| dense-unmasked | 2,048 | 32 | 1.000 |  |  |  |  |  |" in text[whole:documents]
    assert "| nsa | 2,048 | 32 | 1.875" not in text, "an older row says nothing of how it went"
    plots = {file.name for file in tmp_path.glob("train-speed-*.png")}
    assert plots == {
        "train-speed-seed-model-bfloat16-nvidia-h200.png",
        "train-speed-seed-model-document-masks-bfloat16-nvidia-h200.png",
    }


def test_kernels_of_a_step_have_kinds() -> None:
    names = {
        "selected branch": ["selected_gather_bwd_kernel", "list_kernel", "key_kernel"],
        "window and compressed branch": ["range_dq_kernel", "range_fwd_kernel_window"],
        "scores and choice": ["select_kernel"],
        "other kernels of this library": ["heads_kernel", "compress_fwd_kernel", "observe_kernel"],
        "cuDNN attention": ["cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "cudnn::fusion::convert_dq_to_16bits"],
        "matrix products": ["nvjet_sm90_tst_192x192_64x3", "cutlass::Kernel2", "cublasLt::splitKreduce_kernel"],
        "made by the compiler": ["triton_poi_fused_silu_12"],
        "the rest": ["at::native::reduce_kernel", "DeviceRadixSortOnesweepKernel"],
    }
    found = kernel_kinds({name: 1000.0 for kind in names.values() for name in kind})
    assert found == {kind: float(len(each)) for kind, each in names.items()}


def test_a_plot_over_length_shows_one_batch() -> None:
    rows = [make_row(seq_len=seq_len, batch=batch) for seq_len, batch in ((2048, 32), (2048, 4), (65_536, 1))]
    assert [(row.seq_len, row.batch) for row in largest_batches(rows)] == [(2048, 32), (65_536, 1)]


def test_report_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, some in (("a.jsonl", rows()[:6]), ("b.jsonl", rows()[6:])):
        file = RowFile(tmp_path / name)
        for row in some:
            file.add(row)
    words = ["bench", "report", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'report.md'}\n"
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert cli.main(words) == 2
    assert "a.jsonl:1: the row must have every field" in capsys.readouterr().err


def test_without_a_figure_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must hold at least one figure"):
        write_report([rows()[-1]], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_newest_row_of_a_kind_counts() -> None:
    old, new = make_row(ms_p50=1.0), make_row(ms_p50=2.0, date="2026-02-01T00:00:00+00:00")
    red = make_row(correct=False, ms_p50=None, ms_p20=None, ms_p80=None, note="wrong", date="2026-03-01T00:00:00+00:00")
    for order in ([old, new, red], [red, new, old]):
        assert newest_rows(order) == [new]
    assert len(newest_rows([old, make_row(mode="fwd_bwd"), make_row(batch=1), make_row(gpu="other")])) == 4


def test_rows_of_different_runs_are_not_divided(tmp_path: Path) -> None:
    apart = [Row(**{**asdict(row), "run_id": row.provider}) for row in rows()]
    text = write_report(apart, tmp_path).read_text()
    assert "becomes faster" not in text
    assert "of dense-cudnn: must" not in text


def test_exponents_and_crossover() -> None:
    assert fitted_exponent([(128, 9.0), (2048, 1.0), (4096, 2**0.5), (8192, 2.0)]) == pytest.approx(0.5)
    assert fitted_exponent([(128, 1.0), (2048, 1.0)]) is None
    assert crossover([(1024, 4.0), (4096, 0.25)]) == pytest.approx(2048)
    assert crossover([(1024, 2.0), (2048, 1.5)]) is None
    assert crossover([(1024, 0.5), (2048, 0.2)]) is None


def test_series_are_in_order_of_length() -> None:
    made = series(reversed(rows()), lambda row: row.ms_p50)
    assert made["dense-cudnn", "fwd"] == [(2048, 1.0), (8192, 4.0), (65_536, 32.0)]
