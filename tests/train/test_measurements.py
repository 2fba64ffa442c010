"""Files of measurements: which can be compared, and how those that cannot are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsa.errors import UserError
from nsa.train.evaluation import Measurement
from nsa.train.measurements import compare, load_measurement, save_measurement
from nsa.train.run_folder import RunFolder
from nsa.train.runs.evaluation import evaluate_run
from tests.train.cases import make_trainer, tiny_config

ROOT = Path(__file__).resolve().parents[2]
OLDER: dict[str, Any] = {"run": "runs/nsa", "step": 4, "split": "test", "text": "shards"}
OLDER |= {"tokenizer": "f", "seq_len": 4, "windows": 9}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path):
    """Writes a file of a model of so many nats in each of two documents."""

    def made(name, nats, targets=8, **about):
        path = tmp_path / name
        documents = np.array([[nats, targets, 8], [2 * nats, 9, 9]])
        positions = np.array([[nats, 17, 17]] * 4)
        save_measurement(path, Measurement(documents, positions), {**OLDER, **about})
        return path

    return made


def refused(first: list[Path], second: list[Path]) -> str:
    with pytest.raises(UserError) as found:
        compare(first, second)
    return str(found.value)


def test_what_differs_is_named_with_the_files(write):
    a, b = write("a.npz", 5, split="test"), write("b.npz", 6, 7, split="validation")
    assert refused([a], [b]) == f"{b} must have the split of {a} (test), got validation."


def test_files_of_an_earlier_version_are_compared_as_far_as_they_say(write):
    """The second differs from the third, although the first says nothing."""
    new: dict[str, Any] = {"document_mask": False, "text_sha256": "abc", "seed": 1}
    old, now = write("old.npz", 5), write("now.npz", 6, **new)
    assert compare([old], [now])["num_documents"] == compare([now], [old])["num_documents"] == 2
    third, fourth = write("c.npz", 7), write("d.npz", 8, **{**new, "document_mask": True})
    said = refused([old, now], [third, fourth])
    assert f"{fourth} must have the document_mask of {now} (False), got True" in said
    less = write("less.npz", 9, targets=7)
    assert f"{less} must have the targets of {old} in each document" in refused([old], [less])


def test_committed_files_can_be_compared():
    folder = ROOT / "benchmarks/quality"
    found = compare([folder / "90m/nsa-test.npz"], [folder / "90m/dense-test.npz"])
    assert found["num_documents"] > 1
    files = sorted(folder.rglob("test.npz"))
    assert len(files) > 2
    for path in files:
        load_measurement("FILES", path)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06"])
def test_a_file_of_another_kind_is_refused_without_advice_to_unpickle(tmp_path, write, content):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    said = refused([path], [write("a.npz", 5)])
    assert said == f"FILES must be a file of nsa eval --save, got {path}."


def test_eval_saves_which_model_and_text_it_measured(tmp_path, monkeypatch):
    """Runs that differ in the mask are comparable on other text: its sequences do not change."""
    monkeypatch.chdir(tmp_path)
    config = tiny_config(tmp_path, steps=1)
    for name, seed, document_mask in (("a", 1, True), ("b", 2, True), ("c", 1, False)):
        data = dataclasses.replace(config.data, document_mask=document_mask)
        make_trainer(dataclasses.replace(config, seed=seed, data=data), tmp_path / name).run()
        folder = RunFolder.open(name)
        for text in (None, "text"):
            save = Path(f"{name}-{text}.npz")
            list(evaluate_run(folder, text=text, save=save, device="cpu", num_sequences=4))
    abouts = {x.stem: load_measurement("", x)[1] for x in tmp_path.glob("*.npz")}
    assert [abouts[f"{name}-None"]["seed"] for name in "abc"] == [1, 2, 1]
    assert [abouts[f"{name}-None"]["document_mask"] for name in "abc"] == [True, True, False]
    for text in ("None", "text"):
        (digest,) = {abouts[f"{name}-{text}"]["text_sha256"] for name in "abc"}
        assert len(digest) == 64
    assert len({about["checkpoint_sha256"] for about in abouts.values()}) == 3
    pair = [Path("a-None.npz")], [Path("b-None.npz")]
    all_targets, late = compare(*pair), compare(*pair, context=16)
    assert all_targets["num_documents"] >= late["num_documents"] > 1
    assert all_targets["difference_bits_per_byte"] != late["difference_bits_per_byte"]
    assert compare([Path("a-text.npz")], [Path("c-text.npz")])["num_documents"] > 1
    said = refused([Path("a-None.npz")], [Path("c-None.npz")])
    assert said == "c-None.npz must have the document_mask of a-None.npz (True), got False."
