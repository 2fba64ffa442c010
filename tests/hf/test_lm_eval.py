"""lm-eval's tasks of ``docs/lm_eval``, and its figures: those of ``nsa eval --text``."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.conftest import Command, finished, nsa, refusal, run, tiny

__all__ = ["finished", "nsa", "refusal", "run", "tiny"]  # fixtures

TASKS = Path(__file__).resolve().parents[2] / "docs/lm_eval"
NEEDLES = {"needles": "single", "multi_key": "multi_key", "variables": "variables"}
# of bytes: longer than a window of 64, a whole number of windows, and shorter
TEXTS = ["the 3 quick brown föxes; " * 11, "lazy dogs; jump " * 8, "a fox"]


def task(name: str) -> dict[str, Any]:
    """A task with what it includes, as lm-eval merges them."""
    found = yaml.safe_load((TASKS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    included = found.pop("include", None)
    return found if included is None else task(included.removesuffix(".yaml")) | found


def export(nsa: Command, run: Path) -> None:
    """A model whose text is not uniform any more, as folder ``m``."""
    nsa(f"train tiny.yaml --run-dir more --init-from {run} --steps 30 --optim.lr 0.01")
    nsa("export more m")


# --------------------------------------------------------------------------------------------------
# without lm-eval


@torch.no_grad()
def nats_of(model: Any, tokens: list[int], prefix: int, seq_len: int) -> float:
    """Rolling log-likelihood as lm-eval defines it, a window at a time."""
    total, done, text = 0.0, 0, [prefix, *tokens]
    while done < len(tokens):
        end = min(done + seq_len, len(tokens))
        x = torch.tensor([text[max(0, end - seq_len) : end + 1]])
        logits = model(x[:, :-1]).logits[0, done - end :]
        nats = torch.nn.functional.cross_entropy(logits, x[0, done - end :], reduction="sum")
        total, done = total + float(nats), end
    return total


def test_bits_per_byte_of_transformers_are_ours(run, nsa, tiny):
    """Of a folder of files: all their bits over all their bytes."""
    export(nsa, run)
    model, tokenizer = (x.from_pretrained("m") for x in (AutoModelForCausalLM, AutoTokenizer))
    seq_len, prefix = model.config.max_position_embeddings, tokenizer.eos_token_id
    (tiny / "some").mkdir()
    nats = 0.0
    for number, text in enumerate(TEXTS):
        (tiny / f"some/{number}.txt").write_text(text, encoding="utf-8")
        nats += nats_of(model, tokenizer(text)["input_ids"], prefix, seq_len)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    found = json.loads(nsa("eval more --text some --json --micro-batch 2"))
    assert (found["num_bytes"], found["windows"]) == (num_bytes, 5 + 2 + 1)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, abs=1e-5)


def test_prompts_hide_what_they_ask_for(nsa, refusal, tiny):
    nsa("data needles needles.jsonl --size 700 --number 50")
    rows = [json.loads(line) for line in (tiny / "needles.jsonl").read_text().splitlines()]
    assert len(rows) == 50
    for row in rows:
        key, answer = re.findall(r"numbers for (\w+) is: (\d+)\.\n", row["prompt"])[0]
        assert answer == row["answer"]
        assert row["prompt"].endswith(f"number for {key} mentioned in the provided text is")
        assert 700 - 100 < len(row["prompt"]) <= 700
    assert {row["depth"] for row in rows} == {0, 0.25, 0.5, 0.75, 1}
    assert len({row["answer"] for row in rows}) == 50
    for place in ("needles.jsonl", "nowhere/needles.jsonl"):
        rule = f"OUT must name a new file in an existing folder, got {place}"
        assert rule in refusal(f"data needles {place}")
    assert "size must be at least 423 bytes, got 9" in refusal("data needles x --size 9")
    assert "number must be from 1 to 1,000,000, got 0" in refusal("data needles x --number 0")


def test_prompts_hide_other_keys(nsa, tiny):
    nsa("data needles multi_key.jsonl --task multi_key --number 50")
    for line in (tiny / "multi_key.jsonl").read_text().splitlines():
        row = json.loads(line)
        numbers = dict(re.findall(r"numbers for (\w+) is: (\d+)\.\n", row["prompt"]))
        (key,) = re.findall(r"number for (\w+) mentioned in the provided text is$", row["prompt"])
        assert (len(numbers), numbers[key]) == (4, row["answer"])


def test_prompts_hide_chains_of_variables(nsa, tiny):
    """Assignments in the order of the text lead to the answer, and to no other chain's."""
    nsa("data needles variables.jsonl --task variables --number 50")
    for line in (tiny / "variables.jsonl").read_text().splitlines():
        row, values = json.loads(line), dict[str, str]()
        for name, value in re.findall(r"VAR (\w+) = (.+)\.\n", row["prompt"]):
            values[name] = values[value[4:]] if value.startswith("VAR ") else value
        asked = re.findall(r"with the value (\d{5}), .* are$", row["prompt"])
        found = [name for name in values if [values[name]] == asked]
        assert (len(values), len(found)) == (10, 5)
        assert row["answer"] == " ".join(found)


@pytest.mark.parametrize("name", NEEDLES)
def test_tasks_read_what_is_there(nsa, tiny, name):
    """Columns of the files, an answer that the filter finds, room for it."""
    nsa(f"data needles {name}.jsonl --number 1 --task {NEEDLES[name]}")
    (row,) = map(json.loads, (tiny / f"{name}.jsonl").read_text().splitlines())
    needles = task(name)
    assert needles["task"] == f"nsa_{name}"
    assert needles["dataset_kwargs"] == {"data_files": {"test": f"{name}.jsonl"}}
    assert {needles["doc_to_text"], needles["doc_to_target"]} < row.keys()
    (filtered,) = needles["filter_list"]
    pattern = filtered["filter"][0]["regex_pattern"]
    assert re.findall(pattern, f" {row['answer']}. And") == [row["answer"]]
    assert needles["generation_kwargs"]["max_gen_toks"] > len(row["answer"]) + 1


def test_text_is_read_as_one_document():
    text = task("text")
    assert text["output_type"] == "loglikelihood_rolling"
    assert text["dataset_kwargs"]["sample_by"] == "document"


# --------------------------------------------------------------------------------------------------
# with lm-eval


@pytest.fixture
def lm_eval(monkeypatch, tmp_path):
    """The package, which reads data sets from this machine alone."""
    found = pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return found


def figures(lm_eval: Any, model: Any, *names: str) -> dict[str, Any]:
    """Results of tasks by their names."""
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    options = {"task_manager": tasks, "bootstrap_iters": 0, "batch_size": 2, "device": "cpu"}
    found: dict[str, Any] = lm_eval.simple_evaluate(model, tasks=list(names), **options)["results"]
    return found


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_gives_our_figures(lm_eval, run, nsa, tiny, monkeypatch):
    from lm_eval.models.huggingface import HFLM

    export(nsa, run)
    for name, kind in NEEDLES.items():
        nsa(f"data needles {name}.jsonl --number 3 --size 700 --task {kind}")
    for text in TEXTS:
        (tiny / "text.txt").write_text(text, encoding="utf-8")
        ours = json.loads(nsa("eval more --text text.txt --json"))["bits_per_byte"]
        model = HFLM("m", device="cpu", batch_size=2)
        theirs = figures(lm_eval, model, "nsa_text")["nsa_text"]["bits_per_byte,none"]
        assert round(theirs, 4) == pytest.approx(round(ours, 4), abs=1e-9)
    model = HFLM("m", device="cpu", batch_size=2, max_length=800)
    lines = [x for name in NEEDLES for x in (tiny / f"{name}.jsonl").read_text().splitlines()]
    answers = {row["prompt"]: f" {row['answer']}. And" for row in map(json.loads, lines)}

    def right(asked: Any, **_: Any) -> list[str]:
        return [answers[one.args[0]] for one in asked]

    for share in (0, 1):
        for name, kind in {
            "needles": "number",
            "multi_key": "number",
            "variables": "names",
        }.items():
            found = figures(lm_eval, model, f"nsa_{name}")[f"nsa_{name}"]
            assert found[f"exact_match,{kind}"] == share
        monkeypatch.setattr(model, "generate_until", right)
