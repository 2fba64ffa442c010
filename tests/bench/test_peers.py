"""``python -m benchmarks.peers`` with hand-made packages, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.peers import __main__ as command
from benchmarks.peers.adapters import (
    SELECTED,
    WHOLE,
    Peer,
    by_head,
    by_token,
    nsa_select,
    nsa_whole,
)
from nsa import NSAConfig
from nsa.bench import clock
from nsa.bench.consumers import CONSUMERS
from nsa.bench.rows import Row, read_rows

WORDS = "--shape 2x1x16x16 --tokens 128 --choice random --dtype float32 --budget-ms 1"
RIGHT = Peer("right", SELECTED, consume=CONSUMERS[0].consume, kernels=((), ()))


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seq_len: int, *peers: Peer
) -> tuple[int, list[Row]]:
    """Exit code, and the rows of the packages."""
    monkeypatch.setattr(clock, "BUDGET_MS", clock.BUDGET_MS)  # restored after the command
    monkeypatch.setattr(command, "PEERS", peers)
    sizes: dict[str, Any] = {"compress_block_size": 8, "compress_stride": 4, "block_size": 16}
    pattern = NSAConfig(2, 1, 16, 16, **sizes, num_selected_blocks=4, window_size=32)
    monkeypatch.setattr(command, "parse_shape", lambda text: pattern)
    out = tmp_path / "rows.jsonl"
    code = command.main([*WORDS.split(), "--seqs", str(seq_len), "--out", str(out)])
    rows = read_rows([out])
    assert [row.note for row in rows[:2]] == ["not run: it needs a CUDA GPU"] * 2  # dense
    return code, rows[2:]


def test_selected_branch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise TypeError("group of 2\nmore")

    assert RIGHT.consume is not None
    make, attend = RIGHT.consume
    shifted = (lambda ids, config: make(ids.roll(1, 1), config), attend)
    absent, refusing = replace(RIGHT, module="not_installed"), (refuse, attend)
    peers = [RIGHT, replace(RIGHT, name="wrong", consume=shifted), replace(absent, name="absent")]
    peers.append(replace(RIGHT, name="refusing", consume=refusing))
    peers.append(replace(RIGHT, name="forward", backward=False))
    code, rows = run(tmp_path, monkeypatch, 128, *peers)
    assert code == 1
    found = {(row.provider, row.mode): row for row in rows}
    assert len(found) == 10
    row = found["right", "fwd_bwd"]
    assert row.settings is not None
    assert list(row.errors) == ["out", "dq", "dk_slc", "dv_slc"]
    assert row.settings["bit_equal"] == dict.fromkeys(row.errors, True)
    assert (row.settings["package"], row.settings["version"]) == ("torch", torch.__version__)
    assert found["wrong", "fwd"].correct is False
    assert found["absent", "fwd"].note == (
        "not run: cannot import not_installed: No module named 'not_installed'"
    )
    assert found["refusing", "fwd"].note == "not run: TypeError: group of 2"
    assert found["forward", "fwd"].correct
    assert found["forward", "fwd_bwd"].note == "not run: it has no backward pass"
    printed = capsys.readouterr().out
    assert "### attention.selected, 2x1x16x16, random" in printed
    assert "attention.selected, refusing, 2x1x16x16, S 128, fwd: not run: TypeError" in printed


def test_whole_attention_is_checked_with_the_selection_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_ids(*inputs: Any) -> Tensor:
        return nsa_select(*inputs).flip(-1)

    def without_block_1(*inputs: Any) -> Tensor:
        return torch.where(nsa_select(*inputs) == 1, -1, nsa_select(*inputs))

    ours = Peer("right", WHOLE, package="nsa", module="nsa", whole=nsa_whole, select=reversed_ids)
    peers = ours, replace(ours, name="wrong", select=without_block_1)
    code, rows = run(tmp_path, monkeypatch, 128, *peers)  # above n * l'
    assert code == 1
    right, wrong = rows[:2], rows[2:]
    assert [row.case for row in rows] == ["attention.shared"] * 4
    assert [(row.correct, row.recall) for row in right] == [(True, 1.0)] * 2
    assert list(right[1].errors) == ["out", "dq", "dk", "dv", "dgates"]
    assert [row.correct for row in wrong] == [False] * 2


def test_layout_of_block_indices() -> None:
    ids = torch.arange(2 * 6 * 3 * 4, dtype=torch.int32).view(2, 6, 3, 4)
    made, cu_seqlens = by_head(ids, None)  # type: ignore[arg-type]
    assert made.shape == (3, 12, 4)
    assert torch.equal(made[1, 7], ids[1, 1, 1])
    assert cu_seqlens.tolist() == [0, 6, 12]
    assert torch.equal(by_token(made, ids), ids)
