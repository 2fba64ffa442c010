"""``python -m benchmarks.conversion.measure`` on a small random Llama."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.conversion import measure, models, table
from nsa.errors import UserError
from nsa.hf.tokenizer import as_transformers
from nsa.train import environment
from nsa.train.data.tokenizer import SEPARATOR
from tools.evidence_report import read_lines

LENGTHS = (256, 512)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for a small random Llama and a text, with small measurements."""
    pattern = {"num_selected_blocks": 8, "num_local_blocks": 2, "block_size": 16}
    for name, value in {**models.PATTERN, **pattern}.items():
        monkeypatch.setitem(models.PATTERN, name, value)
    values: dict[str, Any] = {
        "NUM_BLOCKS": 8,
        "BLOCK": 16,
        "SAME": 128,
        "UNIT": 32,
        "CHARACTERS": 100,
    }
    values |= {"PASSAGE": 32, "DISTANCES": (64, 384), "DEPTHS": 2, "CONTEXTS": 1, "ANSWER": 3}
    for name, number in values.items():
        monkeypatch.setattr(measure, name, number)
    monkeypatch.setattr(models, "BATCHES", (1, 2))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256}
    config = LlamaConfig(**sizes, initializer_range=0.2, rms_norm_eps=1e-6)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer = as_transformers({"separator": SEPARATOR, "tokenizer": None})
    tokenizer.save_pretrained(tmp_path / "model")
    text, out = tmp_path / "numbers.txt", tmp_path / "rows.jsonl"
    text.write_text(" ".join(map(str, range(400))))
    return [str(tmp_path / "model"), "--text", str(text), "--out", str(out), "--device", "cpu"]


def rows_of(words: list[str], *others: str) -> list[dict[str, Any]]:
    """Rows of the measurement."""
    out = Path(words[words.index("--out") + 1])
    out.unlink(missing_ok=True)
    measure.main([*words, *others])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows(words: list[str]) -> None:
    rows = rows_of(words, "--lengths", "256,512", "--times", "64")
    names = ["dense", "token_max", "mean keys", "random", "window", "index", "dense graph"]
    assert list(dict.fromkeys(row["name"] for row in rows)) == names
    of = {
        (row["name"], row["case"], row.get("length"), row.get("distance")): row
        for row in rows
        if row.get("depth") is None
    }
    for name, length in product(names, LENGTHS):
        loss, needle = of[name, "loss", length, None], of[name, "needle", length, None]
        assert loss["units"] == (length - 128) // 32 * (1489 // length)
        assert loss["low"] <= loss["difference"] <= loss["high"]
        assert needle["cases"] == 2
        copy = of[name, "copy", length, 64]
        assert copy["gain"] - copy["dense_gain"] == pytest.approx(copy["difference"], abs=1e-9)
        is_dense = name.startswith("dense")
        assert (abs(loss["difference"]) < 1e-5) == is_dense
        assert ((name, "mass", length, None) in of) != is_dense
    mass = {name: of[name, "mass", 512, None]["recall"] for name in names[1:6]}
    assert mass["token_max"] > max(mass["random"], mass["window"])
    assert all(0 < share <= 1 for share in mass.values())
    assert of["dense graph", "answer", None, None]["equal"] == 3
    assert {row["batch"] for row in rows if row["case"] == "decode"} == {1, 2}
    assert of["token_max", "prefill", 64, None]["ms"] > 0


def test_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "code_version", lambda: {"commit": None, "dirty": None})
    words += ["--lengths", "256", "--cases"]
    (plain,) = rows_of(words, "loss", "--only", "")[:1]
    chosen = ["loss,mass", "--only", "random", "--commit", "abc", "--yarn", "4"]
    rows = rows_of(words, *chosen)
    cases = [("dense", "loss"), ("random", "loss"), ("random", "mass"), ("dense graph", "loss")]
    assert [(row["name"], row["case"]) for row in rows] == cases
    assert all((row["commit"], row["yarn"]) == ("abc", 4) for row in rows)
    assert abs(rows[-1]["difference"]) < 1e-5  # both dense models are scaled
    assert abs(rows[0]["loss"] - plain["loss"]) > 1e-4
    with pytest.raises(UserError, match="--cases"):
        measure.main([*words, "speed"])


def test_page() -> None:
    """The committed page is made of the committed rows."""
    rows = read_lines(table.HERE / "h100.jsonl")
    assert table.page(rows) == (table.HERE / "h100.md").read_text("utf-8")
    records = list(table.quality(rows, "token_max"))
    losses = [x["difference"] for x in rows if (x["name"], x["case"]) == ("token_max", "loss")]
    assert [record["loss"] for record in records] == [
        f"{sum(losses[n::2]) / 3:+.4f}"
        for n in (0, 1)  # texts in turn, two lengths each
    ]


def test_figures_of_the_results_are_those_of_the_table() -> None:
    rows = read_lines(table.HERE / "h100.jsonl")
    page = (table.HERE.parents[1] / "docs/results/conversion.md").read_text("utf-8")
    cells = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:]
        for line in page.splitlines()
        if line.startswith("| ")
    }
    models_of = ("token_max", "index", "index, 600 steps")
    records = [list(table.quality(rows, name))[-1] for name in models_of]
    for title, field in (("loss minus dense, mean", "loss"), ("the same for", "largest")):
        (shown,) = (values for key, values in cells.items() if key.startswith(title))
        assert shown == [f"{float(record[field]):+.3f}" for record in records]
    (shown,) = (values for key, values in cells.items() if key.startswith("gain of copied"))
    assert [value.split()[0] for value in shown[:1]] == [records[0]["copied"].split()[0]]
    (shown,) = (values for key, values in cells.items() if key.startswith("attention kept"))
    assert shown == [f"{100 * float(record['mass']):.1f}%" for record in records]
    found = {record["model"]: record for record in table.times(rows)}
    for name in models_of[:2]:
        timed = [x for key, x in found[name].items() if key.endswith(("batch 1", "batch 16"))]
        assert cells[name] == [f"{value.partition('(')[2].rstrip(')')}x" for value in timed]
