"""``nsa bench scaling``: the same global batch on one process and on two, rows, the table."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from nsa.bench.scaling import ScalingRow, divided, read_scaling_rows, scaling_table
from nsa.train.config import TrainConfig
from tests.faults.cases import Nsa, Ranks, write_config


def test_the_global_batch_is_divided() -> None:
    config = TrainConfig(micro_batch=4, accumulation=2, global_batch=8)
    parts = [divided(config, number) for number in (1, 2, 4, 8)]
    found = [(part.micro_batch, part.accumulation) for part in parts]
    assert found == [(4, 2), (4, 1), (2, 1), (1, 1)]
    assert {part.global_batch for part in parts} == {8}
    with pytest.raises(
        ValueError,
        match=r"global_batch must be a multiple of the number of processes \(3\), .* got 8",
    ):
        divided(config, 3)


def test_fields_are_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "parallel.md").read_text()
    table = page.partition("| field of a row |")[2]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    explained = [name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(explained) == sorted(field.name for field in dataclasses.fields(ScalingRow))


def scaling_row(**values: Any) -> ScalingRow:
    given: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(ScalingRow))
    given |= {
        "strategy": "ddp",
        "bucket_mib": 25.0,
        "processes": 1,
        "step_ms": 100.0,
        "tokens_per_s": 1e3,
        "loss_nats": 5.0,
    }
    return ScalingRow(**{**given, **values})


@pytest.mark.parametrize(
    "other",
    [{"cuda_graphs": True}, {"compile": True}, {"checkpointing": "full"}, {"commit": "b"}],
    ids=str,
)
def test_a_speed_is_divided_by_that_of_the_same_step_on_one_process(other: dict[str, Any]) -> None:
    two = scaling_row(processes=2, tokens_per_s=1800.0)
    table = scaling_table([scaling_row(), scaling_row(**other, tokens_per_s=1200.0), two])
    assert table.splitlines()[3].split()[6] == "1.80"
    assert "1.80" not in scaling_table([scaling_row(**other), two])


def test_a_speed_up_is_held_against_its_target() -> None:
    def table(gpu: str, config: str) -> str:
        speeds = ((1, 1e3), (2, 1.86e3), (4, 3.5e3))
        run = {"gpu": gpu, "config": config}
        rows = [scaling_row(**run, processes=n, tokens_per_s=speed) for n, speed in speeds]
        return scaling_table(rows)

    lines = table("NVIDIA H200", "seed").splitlines()[-2:]
    verdicts = ["1.86 of one: target 1.85 pass", "3.5 of one: target 3.6 FAIL"]
    assert [line.endswith(verdict) for line, verdict in zip(lines, verdicts, strict=True)] == [
        True,
    ] * 2
    assert "pass" not in table("another", "seed")
    assert "pass" not in table("NVIDIA H200", "1b")


def test_one_process_and_two(tmp_path: Path) -> None:
    config, out = write_config(tmp_path), tmp_path / "rows.jsonl"
    words = ("bench", "scaling", config, "--warmup", "1", "--steps", "2", "--out", out)
    with Nsa(*words, said=tmp_path / "said") as nsa:
        assert nsa.end() == 0, nsa.text
    with Ranks(*words, "--buckets", "0.01", "25", folder=tmp_path) as run:
        assert run.end() == [0, 0], run.text
        assert run.ranks[1].text == ""
    rows = read_scaling_rows(out)
    how = [(row.processes, row.bucket_mib, row.micro_batch, row.accumulation) for row in rows]
    assert how == [(1, 25.0, 2, 2), (2, 0.01, 2, 1), (2, 25.0, 2, 1)]
    assert [row.loss_nats for row in rows] == pytest.approx([rows[0].loss_nats] * 3, rel=1e-5)
    for row in rows:
        assert row.tokens_per_s == pytest.approx(4 * 64 / row.step_ms * 1000, rel=1e-3)
        assert (row.communication_ms, row.exposed_ms, row.peak_mib) == (None,) * 3  # of GPUs alone
        assert 0 < row.exchange_us < 1e6
    speed_up = rows[2].tokens_per_s / rows[0].tokens_per_s
    assert f"{speed_up:.2f}" in scaling_table(rows).splitlines()[3]
    assert scaling_table(rows) in run.ranks[0].text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == []
