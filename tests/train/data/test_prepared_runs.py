"""Runs on prepared shards, straight from a stream, and on the synthetic fallback; the commands."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.train.config import DataConfig
from nsa.train.data import (
    DataBundle,
    DataUnavailableError,
    Origin,
    PrepareConfig,
    open_data,
    prepare,
)
from nsa.train.run_folder import RunFolder
from nsa.train.runs.evaluation import evaluate_run
from nsa.train.telemetry.metrics import read_metrics
from tests.train.cases import make_trainer, reproducible_rows, tiny_config
from tests.train.data.data_sets import make_texts, write_folder

ROOT = Path(__file__).resolve().parents[3]
TEXTS = make_texts(400, longest=40)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("source") / "set", "jsonl", TEXTS)


def make_shards(source: Path, out: Path, tokenizer: Any = "byte", **changes: Any) -> DataConfig:
    config = {"validation_fraction": 0.1, "shard_tokens": 9_000, "licence": "CC0", **changes}
    prepare(PrepareConfig(Origin(str(source)), tokenizer, **config), out)
    return DataConfig("shards", str(out), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def shards(source, tmp_path_factory):
    return make_shards(source, tmp_path_factory.mktemp("shards") / "out")


def stream_of(source: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {"validation_tokens": 2000, "time_limit_s": 60, **changes}
    return DataConfig("stream", str(source), **settings)


def opened(config: DataConfig, seq_len: int = 64, **how: Any) -> DataBundle:
    data = open_data(config, seed=1, seq_len=seq_len, **how)
    assert json.loads(json.dumps(data.description)) == data.description
    return data


def run(folder: Path, data: DataConfig, resume: bool = False, **changes: Any) -> Path:
    config = dataclasses.replace(tiny_config(folder.parent, **changes), data=data)
    make_trainer(config, folder, resume=resume).run()
    return folder


def evaluation(folder: Path) -> list[str]:
    return [found.line for found in evaluate_run(RunFolder.open(folder), num_sequences=2)]


# --- opening the data -----------------------------------------------------------------------------


def test_mistakes_in_what_is_opened_are_named(shards, source, tmp_path):
    path = tmp_path / "tokenizer.json"
    opened(DataConfig(tokenizer="bpe", bpe_vocab_size=300)).tokenizer.save(path)
    bpe = make_shards(source, tmp_path / "bpe", "bpe", bpe_vocab_size=301)
    gpt2 = dataclasses.replace(shards, tokenizer="gpt2")
    for config, how, message in (
        (gpt2, {}, r"data\.tokenizer must be byte, as the shards are, got g"),
        (shards, {"seq_len": 10**6}, r"seq_len must be below the \d+ tokens of the train text"),
        (stream_of(source), {"seq_len": 10**6}, r"be below the \d+ tokens of the validation text"),
        (
            bpe,
            {"run_folder_tokenizer": path},
            r"data\.path must contain shards of the run's tokenizer",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            opened(config, **how)
    assert opened(bpe).tokenizer.vocab_size == 301


def test_synthetic_data_only_if_asked_for(shards, tmp_path, caplog):
    path = str(tmp_path / "not" / "there")
    for config in (DataConfig("shards", path, tokenizer="gpt2"), DataConfig("stream", path)):
        with pytest.raises(DataUnavailableError):
            opened(config)
        data = opened(dataclasses.replace(config, synthetic_fallback="copy"))
        assert (data.description["synthetic"], data.description["source"]) == (True, "copy")
        assert data.tokenizer.kind == config.tokenizer
        assert data.train.token_bytes.shape == (data.tokenizer.vocab_size,)
        said = caplog.messages[-1]
        assert "SYNTHETIC DATA (copy) instead, as data.synthetic_fallback says: " in said
        assert path in said
    fallback = DataConfig("shards", path, synthetic_fallback="uniform")
    folder = run(tmp_path / "run", fallback, steps=3, log_every=1)
    assert [row["data_synthetic"] for row in read_metrics(folder / "metrics.jsonl")] == [True] * 3
    header, *_, last = (folder / "metrics.csv").read_text().splitlines()
    assert last.split(",")[header.split(",").index("data_synthetic")] == "true"
    assert any("synthetic task, no text" in line for line in evaluation(folder))
    broken = shutil.copytree(str(shards.path), tmp_path / "broken")
    (broken / "train-00001.tokens").unlink()
    with pytest.raises(ValueError, match=r"train-00001\.tokens must have \d+ bytes"):
        opened(DataConfig("shards", str(broken), synthetic_fallback="uniform"))


# --- training -------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["shards", "stream"])
def test_a_resumed_run_is_the_uninterrupted_run(kind, tmp_path):
    """Resumed after half the steps, in the second epoch; the data are in another folder by then."""
    source = write_folder(tmp_path / "source", "jsonl", TEXTS[:30])
    if kind == "shards":
        data = make_shards(source, tmp_path / "shards", validation_fraction=0.4)
    else:
        data = stream_of(source, validation_fraction=0.4)
    settings: dict[str, Any] = {"steps": 16, "checkpoint_every": 8, "log_every": 1}
    whole = run(tmp_path / "whole", data, **settings)
    baseline = {
        "shards": "than the bigram baseline",
        "stream": "no bigram baseline: the source does not keep its training text",
    }
    assert baseline[kind] in evaluation(whole)[-1]
    cut = shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(next((cut / "checkpoints").glob("step-*16")))
    moved = str(Path(str(data.path)).rename(tmp_path / "moved"))
    config = dataclasses.replace(
        tiny_config(tmp_path, **settings), data=dataclasses.replace(data, path=moved)
    )
    resumed = make_trainer(config, cut, resume=True)
    place = resumed.state.sampler.state_dict()
    assert resumed.state.progress.step == 8
    assert place["epoch"] == 1 if kind == "stream" else resumed.state.sampler.epoch == 1
    resumed.run()
    assert reproducible_rows(cut) == reproducible_rows(whole)
    assert all("data_synthetic" not in row for row in read_metrics(cut / "metrics.jsonl"))


WITHOUT = """
import sys
for name in ("datasets", "huggingface_hub", "pyarrow", "tiktoken"):
    sys.modules[name] = None  # as if it were not installed
import nsa.train.trainer
from nsa.train.config import DataConfig
from nsa.train.data import collate, open_data
config = DataConfig(source="shards", path=sys.argv[1])
data = open_data(config, seed=1, seq_len=64)
collate(data.train, data.sampler(64, 1).next_indices(2), 64, document_mask=True)
from nsa import cli
for source in sys.argv[2:]:
    words = ["--tokenizer", "byte", "--validation-fraction", "0.1", "--out", source + "-shards"]
    assert cli.main(["data", "prepare", source, *words]) == 0
"""


def test_local_text_and_training_from_shards_need_no_extra_data(shards, tmp_path):
    texts = write_folder(tmp_path / "texts", "txt", TEXTS[:60])
    rows = write_folder(tmp_path / "rows", "jsonl.gz", TEXTS)
    command = [sys.executable, "-c", WITHOUT, str(shards.path), str(texts), str(rows)]
    subprocess.run(command, cwd=ROOT, timeout=120, check=True)


# --- commands -------------------------------------------------------------------------------------
def nsa(words: str, *more: str) -> int:
    return cli.main([*words.split(), *more])


PREPARE = "data prepare --tokenizer byte --out out --validation-fraction"


def test_the_commands(source, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nsa(f"{PREPARE} 0.1", str(source)) == 0
    said = capsys.readouterr().out
    assert "train: " in said
    data = "--data.source shards --data.path out --data.tokenizer byte"
    assert said.endswith(f"train on it with: {data} --model.vocab-size 256\n")
    assert nsa(f"{PREPARE} 0.1", str(source)) == 0
    assert capsys.readouterr().out == f"out was complete; SOURCE was not read again\n{said}"
    assert nsa("data verify out") == 0
    assert "4 files, " in capsys.readouterr().out
    path = tmp_path / "out" / "train-00000.tokens"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert nsa("data verify out") == 2
    said = capsys.readouterr().err
    assert "out/train-00000.tokens must have the SHA-256 of index.json" in said


def test_a_preparation_without_validation_text_fails_and_leaves_nothing(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = str(write_folder(tmp_path / "set", "txt", TEXTS[:40]))
    assert nsa(f"{PREPARE} 1e-9", folder) == 2
    said = capsys.readouterr().err
    assert (
        "--validation-fraction must leave documents in every split, got 1e-09, which leaves "
        in said
    )
    assert "40 for train and 0 for validation" in said
    assert not Path("out").exists()
    assert nsa(f"{PREPARE} 0.3", folder) == 0, "the same folder takes the next try"
