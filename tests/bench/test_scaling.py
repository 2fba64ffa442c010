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
    found = [(part.micro_batch, part.accumulation, part.global_batch) for part in parts]
    assert found == [(4, 2, 8), (4, 1, 8), (2, 1, 8), (1, 1, 8)]
    why = r"global_batch must be a multiple of the number of processes \(3\), .* got 8"
    with pytest.raises(ValueError, match=why):
        divided(config, 3)


def test_fields_are_explained() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "parallel.md").read_text()
    lines = re.findall(r"^\| (`.*?) \|", page.partition("| field of a row |")[2], re.MULTILINE)
    explained = re.findall(r"`(\w+)`", " ".join(lines))
    assert sorted(explained) == sorted(field.name for field in dataclasses.fields(ScalingRow))


def scaling_row(**values: Any) -> ScalingRow:
    given: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(ScalingRow))
    given |= {"strategy": "ddp", "bucket_mib": 25.0, "processes": 1, "step_ms": 100.0}
    return ScalingRow(**{**given, "tokens_per_s": 1e3, "loss_nats": 5.0, **values})


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


def test_a_speed_up_is_compared_with_its_target() -> None:
    speeds = {1: 1e3, 2: 1.86e3, 4: 3.5e3}
    rows = [scaling_row(processes=n, tokens_per_s=speed) for n, speed in speeds.items()]
    assert "target" not in scaling_table(rows)
    here = [dataclasses.replace(row, gpu="NVIDIA H200", config="seed") for row in rows]
    two, four = scaling_table(here).splitlines()[-2:]
    assert two.endswith("1.86 of one: target 1.85 pass")
    assert four.endswith("3.5 of one: target 3.6 FAIL")


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
    assert scaling_table(rows) in run.ranks[0].text
