"""``nsa generate`` and ``nsa inspect`` as they are typed."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from nsa import cli
from nsa.train.generation import Generation
from tests.cli.conftest import pipe
from tests.train.cases import make_trainer, tiny_config

SHORT = "generate run --max-new-tokens 12 --seed 1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with run folders of a small model, and of a dense one."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer(tiny_config(folder, steps=4, checkpoint_every=2), folder / "run").run()
    dense = {"attention": "dense"}
    make_trainer(tiny_config(folder, steps=1, model=dense), folder / "dense").run()
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """An empty folder in which commands run, beside the runs ``run`` and ``dense``."""
    for name in ("run", "dense"):
        (tmp_path / name).symlink_to(trained / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- prompts --------------------------------------------------------------------------------------
def test_checkpoints_and_prompts(here, nsa, monkeypatch):
    said = nsa(f"{SHORT} --prompt 'aaa bb'")
    assert said.startswith("aaa bb")
    pipe(monkeypatch, b"aaa bb")
    assert nsa(f"{SHORT} --prompt -") == said
    assert nsa(f"{SHORT} --prompt 'aaa bb' --checkpoint 4") == said
    assert nsa(f"{SHORT} --prompt 'aaa bb' --checkpoint 2") != said
    expected = nsa(f"{SHORT} --prompt aaa --prompt 'b \u2028 b' --prompt ' c'")
    assert expected.count("--- prompt") == 3
    Path("lines.txt").write_bytes("aaa\n\n  \nb \u2028 b\r\n c".encode())
    for name in ("lines.txt", "lines.txt --batch-size 2"):
        assert nsa(f"{SHORT} --prompt-file {name}") == expected
    Path("two.txt").write_text("b \u2028 b\n c\n", encoding="utf-8")
    assert nsa(f"{SHORT} --prompt aaa --prompt-file two.txt --batch-size 1") == expected


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--prompt - --prompt -", "--prompt - must be given only once, got it 2 times"),
        ("--prompt -", "standard input must be text in UTF-8"),
        ("--prompt a --temperature -1", "temperature must be at least 0"),
        ("--prompt-file none.txt", "must name an existing file"),
        ("--prompt-file a.txt", "--prompt-file must contain a prompt, got none in a.txt"),
        ("--prompt-file b.txt", "must be text in UTF-8, got another byte at offset 2"),
        ("--prompt a --prompt b --show-selection", "must be left out for several prompts, got 2"),
        ("--prompt a --selection-png no/a.png", "must name a file in an existing folder, got no"),
        ("--prompt a --selection-png dense", "must name a file in an existing folder, got dense"),
    ],
)
def test_refusals(here, refusal, monkeypatch, words, answer):
    pipe(monkeypatch, b"\xff")
    Path("a.txt").write_bytes(b"")
    Path("b.txt").write_bytes(b"x\n\xff")
    assert answer in refusal(f"generate run {words}")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_on_a_terminal_and_kept_in_a_pipe(here, nsa, monkeypatch):
    odd = "a\tb\x1b]0;title\x07\r\x9b2J\x7f\u202e"
    words = f"generate run --prompt '{odd}' --prompt aaa --max-new-tokens 60 --temperature 9"
    piped = nsa(words)
    assert piped.startswith(f"--- prompt 1\n{odd}")
    control = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
    drawn = piped.partition("--- prompt 2")[2]
    assert control.search(drawn), "generated text has some, too"
    screen, errors = Screen(), Screen()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", errors)
    assert cli.main(shlex.split(words)) == 0
    shown = screen.getvalue()
    assert "a\tb\\x1b]0;title\\x07\\x0d\\x9b2J\\x7f\\u202e" in shown
    plain = re.sub(r"\\(?:x(..)|u(....))", lambda found: chr(int(found[1] or found[2], 16)), shown)
    assert plain == piped
    assert cli.main(["eval", odd]) == 2
    assert "got a\tb\\x1b]0;title" in errors.getvalue()
    assert not control.search(shown + errors.getvalue())


def test_options_reach_the_sampling(here, nsa):
    greedy = nsa(f"{SHORT} --prompt aaa --temperature 0")
    for words in ("--min-p 1", "--top-k 1", "--top-p 0.000001"):
        assert nsa(f"{SHORT} --prompt aaa {words}") == greedy
    penalised = nsa(f"{SHORT} --prompt aaa --temperature 0 --repetition-penalty 1000000")
    text = penalised.removeprefix("aaa").removesuffix("\n")
    assert len(set(text)) == len(text)
    stop = greedy[6:9]
    until = greedy.find(stop, 3)
    assert nsa(f"{SHORT} --prompt aaa --temperature 0 --stop zzz --stop '{stop}'") == (
        f"{greedy[:until]}\n"
    )


# --- the interactive loop -------------------------------------------------------------------------
LOOP = "generate run --interactive --max-new-tokens 6 --temperature 0"


def test_each_line_continues_the_text_so_far(here, nsa, monkeypatch):
    def typed(text):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return nsa(LOOP)

    first = typed("aaa\n\nnot read\n")
    alone = nsa("generate run --max-new-tokens 6 --temperature 0 --prompt aaa")
    assert f"aaa{first}" == alone
    both = typed("aaa\nbb\n")
    assert both.startswith(first)
    text = f"{alone}bb"
    whole = nsa(f"generate run --max-new-tokens 6 --temperature 0 --prompt '{text}'")
    assert both.removeprefix(first) == whole.removeprefix(text)


def test_ctrl_c_ends_a_text_and_not_the_loop(here, nsa, monkeypatch):
    steps, count = Generation.__next__, itertools.count(1)

    def interrupted(self):
        if next(count) == 4:
            raise KeyboardInterrupt
        return steps(self)

    monkeypatch.setattr("sys.stdin", io.StringIO("aaa\n"))
    whole = nsa(LOOP)
    monkeypatch.setattr(Generation, "__next__", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("aaa\nbb\n"))
    first, second = nsa(LOOP).splitlines()
    assert first == whole[:3]
    assert len(second) == 6


# --- selections -----------------------------------------------------------------------------------
def test_show_selection(here, nsa, refusal, capsys):
    words = "generate run --max-new-tokens 12 --temperature 0 --prompt"
    prompt = "a bb ccc dddd eeeee " * 5
    expected = nsa(f"{words} '{prompt}'")
    assert cli.main([*words.split(), prompt, "--show-selection"]) == 0
    said = capsys.readouterr()
    assert said.out == expected
    speed, title, layer, picture = said.err.splitlines()
    times = r"in [\d.]+ s, [\d,.]+ tokens/s"
    assert re.fullmatch(f"prefill 100 tokens {times}; decode 11 tokens {times}", speed)
    assert "blocks selected for token 111 of the text (blocks of 16 tokens" in title
    assert re.fullmatch(r"layer  0 \|█[ █]{4}██\| 0:[\d: ]+:111", layer)
    assert picture == "heat maps: selection.png"
    nsa(f"{words} x --selection-png other.png")
    for name in ("selection.png", "other.png"):
        assert Path(name).read_bytes().startswith(b"\x89PNG\r\n")
    dense = refusal("generate dense --prompt a --show-selection")
    assert "--show-selection must be left out for a model without the selected branch" in dense


def test_inspect_writes_a_page_and_json(here, nsa, monkeypatch):
    said = nsa("inspect run --output page.html")
    assert said.startswith("checkpoint: step 4 of run, on cpu in fp32; 64 tokens of validation")
    assert said.endswith("page: page.html\n")
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    text = "a bb ccc dddd eeeee " * 30
    Path("text.txt").write_text(text)
    found = json.loads(nsa("inspect run --text text.txt --tokens 200 --json --record blocks.npz"))
    blocks = np.load("blocks.npz")
    assert [*blocks] == [*(f"layer{n}" for n in range(len(found["layers"]))), "block_size"]
    size = found["layers"][0]["selection"]["block_size"]
    assert (blocks["layer0"].shape[2], int(blocks["block_size"])) == (200, size)
    assert Path("run/inspection.html").is_file()
    pipe(monkeypatch, text.encode())
    again = json.loads(nsa("inspect run --text - --tokens 200 --json"))
    assert again == {**found, "text": "standard input"}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("dense", "RUN must be a run of a model with attention nsa, got dense"),
        ("run --tokens 1", "--tokens must be above 1, got 1"),
        ("run --tokens 9999999", "--tokens must fit into the validation text"),
        ("run --text none.txt", "--text must name an existing file"),
        ("run --checkpoint 9", "--checkpoint must be last, best or one of 2, 4, got 9"),
        ("run --record none/a.npz", "--record must name a new file in an existing folder"),
        ("run --record old.npz", "--record must name a new file in an existing folder"),
    ],
)
def test_inspections_that_are_refused_before_anything_is_written(here, refusal, words, answer):
    Path("old.npz").touch()
    Path("run/inspection.html").unlink(missing_ok=True)
    assert answer in refusal(f"inspect {words}")
    assert Path("old.npz").read_bytes() == b""
    assert not Path("run/inspection.html").exists()
