"""``nsa demo`` with the model and the book of the package, on a CPU."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import same_color

from nsa import demo
from nsa.train.runs.inspection import inspect_text

ROW = re.compile(r"^ *\d+% +([\d,]+)  (\S.*\S) +(\w+) +(right|wrong: (\w+)) +[\d.]+$", re.MULTILINE)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(demo, "WRITTEN", 20)


def test_finds_lines_and_writes(nsa, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = nsa("demo --length 1024 --needles 3 --device cpu")
    rows = ROW.findall(said)
    tokens, _ = demo.hide_lines(demo.book(), 1024, 3, 0)
    for distance, question, answer, outcome, value in rows:
        line = f"\n{question} {value or answer}.\n".encode()
        assert bytes(tokens).find(line) == 1024 - int(distance.replace(",", ""))
        assert (outcome == "right") == (answer == (value or answer))
    right = sum(row[3] == "right" for row in rows)
    assert right >= 2
    assert f"{right} of 3 lines found\n" in said
    assert len(said.partition("|")[2].partition("\n\nselected blocks")[0].encode()) >= 20
    assert Path("demo.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("number", [1, 3])
def test_a_text_with_lines_is_the_text_and_the_lines(number):
    book = demo.book()
    tokens, hidden = demo.hide_lines(book, 1000, number, 7)
    assert len(tokens) == 1000
    rest = tokens.copy()
    for one in reversed(hidden):
        line = f"\n{one.question} {one.value}.\n".encode()
        assert bytes(rest[one.start :]).startswith(line)
        del rest[one.start : one.start + len(line)]
    assert bytes(rest) == book[: len(rest)]
    middles = [(index + 0.5) / number for index in range(number)]
    assert [one.start / 1000 for one in hidden] == pytest.approx(middles, abs=0.1)


@torch.inference_mode()
def test_questions_are_asked_after_the_context_alone():
    model = demo.load_model(torch.device("cpu"))
    tokens, hidden = demo.hide_lines(demo.book(), 1100, 2, 3)
    reader = demo.Reader(model, tokens)
    reader.read()
    reader.ask(hidden[1])
    assert sum(map(len, reader.write(0))) == 20
    answer = reader.ask(hidden[0])
    assert answer.is_right
    context = [*tokens, *hidden[0].line.question]
    found = f" {answer.text}.".encode()
    for token, blocks in zip(found, answer.blocks, strict=False):
        layers = inspect_text(model, context)
        assert blocks == {x.layer: x.blocks[-1].tolist() for x in layers if x.selection}
        assert {*blocks} == {2, 5}
        context.append(token)


def test_the_picture_marks_the_blocks_of_the_line():
    (line,) = demo.hide_lines(demo.book(), 1000, 1, 0)[1]  # from token 482 to 516
    asked, answered = {2: [[0, 6, 7, 9]], 5: [[8, 9, 11]]}, {2: [[7, 8]], 5: [[0, 9]]}
    answer = demo.Answer(line, "1", 0.5, (asked, answered))
    figure = demo.draw([answer], 1000, 64)
    (axes,) = figure.axes
    drawn: Any = axes.collections
    assert (line.start, line.size) == (482, 35)
    marked = Counter(
        (round(ticks.get_segments()[0][0][0] / 64 - 0.5), bool(same_color(ticks.get_color(), "k")))
        for ticks in drawn
    )
    assert marked == {
        (0, False): 2,
        (6, False): 1,
        (7, True): 2,
        (8, True): 2,
        (9, False): 3,
        (11, False): 1,
    }
    assert axes.get_title("left") == f"{line.question} 1: wrong, the line says {line.value}"
    assert figure.get_suptitle() == "0 of 1 lines found in 1,000 tokens"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--needles 0", "--needles must be from 1 to 1024 for 65,536 tokens, got 0"),
        ("--length 1024 --needles 17", "--needles must be from 1 to 16 for 1,024 tokens, got 17"),
        ("--length 100000", "--length must be at most 72,"),
        ("--text none.txt", "--text must name an existing file, got none.txt"),
        ("--length 128 --needles 1 --text nul.txt", "text must contain no NUL byte"),
        ("--picture no/a.png", "--picture must name a file in an existing folder"),
    ],
)
def test_refusals(refusal, tmp_path, monkeypatch, words, answer):
    monkeypatch.chdir(tmp_path)
    Path("nul.txt").write_bytes(b"a\0" * 100)
    assert answer in refusal(f"demo {words}")
