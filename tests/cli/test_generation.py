"""``nsa generate`` and ``nsa inspect`` as they are typed."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from nsa import cli
from nsa.lm.recorded import load_selections
from nsa.train.generation import Generation
from tests.cli.conftest import Command, pipe
from tests.train.cases import make_trainer, tiny_config

PNG = b"\x89PNG\r\n"
SHORT = "generate run --max-new-tokens 12 --seed 1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run folders of a small model, and of a dense one."""
    folder = tmp_path_factory.mktemp("trained")
    make_trainer(tiny_config(folder, steps=4, checkpoint_every=2), folder / "run").run()
    dense = {"attention": "dense"}
    make_trainer(tiny_config(folder, steps=1, model=dense), folder / "dense").run()
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which commands run, beside the runs ``run`` and ``dense``."""
    for name in ("run", "dense"):
        (tmp_path / name).symlink_to(trained / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- prompts --------------------------------------------------------------------------------------


def test_generate_takes_a_checkpoint_and_reads_standard_input(here, nsa, refusal, monkeypatch):
    said = nsa(f"{SHORT} --prompt 'aaa bb'")
    assert said.startswith("aaa bb")
    pipe(monkeypatch, b"aaa bb")
    assert nsa(f"{SHORT} --prompt -") == said
    assert nsa(f"{SHORT} --prompt 'aaa bb' --checkpoint 4") == said
    assert nsa(f"{SHORT} --prompt 'aaa bb' --checkpoint 2") != said
    assert "--prompt - must be given only once, got it 2 times" in refusal(
        "generate run --prompt - --prompt -"
    )
    pipe(monkeypatch, b"\xff")
    assert "standard input must be text in UTF-8" in refusal("generate run --prompt -")
    assert "prompts must contain at least one token" in refusal("generate run --prompt ''")
    below = "temperature must be at least 0"
    assert below in refusal("generate run --prompt a --temperature -1")
    assert "stop must be valid UTF-8" in refusal("generate run --prompt a --stop '\udcff'")
    assert "stop must contain no empty string" in refusal("generate run --prompt a --stop ''")


def test_prompts_of_files_are_those_of_the_command_line(here: Path, nsa: Command) -> None:
    expected = nsa(f"{SHORT} --prompt aaa --prompt 'b \u2028 b' --prompt ' c'")
    assert expected.count("--- prompt") == 3
    Path("lines.txt").write_bytes("aaa\n\n  \nb \u2028 b\r\n c".encode())
    Path("lines.jsonl").write_text(
        '{"prompt": "aaa"}\n\n{"text": "b \\u2028 b", "id": 3}\n{"text": "x", "prompt": " c"}\n'
    )
    for name in ("lines.txt", "lines.jsonl"):
        assert nsa(f"{SHORT} --prompt-file {name}") == expected
        assert nsa(f"{SHORT} --prompt-file {name} --batch-size 2") == expected
    Path("two.txt").write_text("b \u2028 b\n c\n", encoding="utf-8")
    assert nsa(f"{SHORT} --prompt aaa --prompt-file two.txt --batch-size 1") == expected


@pytest.mark.parametrize(
    ("name", "content", "answer"),
    [
        ("a.txt", b"", "--prompt-file must hold a prompt, got none in a.txt"),
        ("a.txt", b"x\n\xff", "--prompt-file must be text in UTF-8, got another byte at offset 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}', "prompt or text, got line 2 of a.jsonl"),
        ("a.jsonl", b'"text"', "got line 1 of a.jsonl"),
        ("a.jsonl", b"text", "got line 1 of a.jsonl"),
    ],
)
def test_files_without_prompts_are_refused(here, refusal, name, content, answer):
    Path(name).write_bytes(content)
    assert answer in refusal(f"generate run --prompt-file {name}")
    assert "must name an existing file" in refusal("generate run --prompt-file none.txt")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_on_a_terminal_and_kept_in_a_pipe(here, nsa, monkeypatch):
    odd = "a\tb\x1b]0;title\x07\r\x9b2J\x7f\u202e"
    words = f"generate run --prompt '{odd}' --prompt aaa --max-new-tokens 200 --temperature 9"
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


def test_options_reach_the_sampling(here: Path, nsa: Command) -> None:
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


def test_tokens_and_their_speed_end_standard_error(here: Path, capsys: Any) -> None:
    words = ["--prompt", "aaa", "--prompt", "bbbbb", "--batch-size", "1"]
    assert cli.main([*SHORT.split(), *words]) == 0
    number = r"[\d,.]+"
    prefill = rf"prefill 8 tokens in {number} s, {number} tokens/s"
    decode = rf"decode 22 tokens in {number} s, {number} tokens/s"
    assert re.fullmatch(f"{prefill}; {decode}\n", capsys.readouterr().err)


# --- the interactive loop -------------------------------------------------------------------------


def test_each_line_continues_the_text_so_far(here, nsa, monkeypatch):
    def typed(text: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return nsa("generate run --interactive --max-new-tokens 6 --temperature 0")

    first = typed("aaa\n\nnot read\n")
    alone = nsa("generate run --max-new-tokens 6 --temperature 0 --prompt aaa")
    assert f"aaa{first}" == alone
    both = typed("aaa\nbb\n")
    assert both.startswith(first)
    text = f"{alone}bb"
    whole = nsa(f"generate run --max-new-tokens 6 --temperature 0 --prompt '{text}'")
    assert both.removeprefix(first) == whole.removeprefix(text)
    assert typed("") == ""


def test_ctrl_c_ends_a_text_and_not_the_loop(here, nsa, monkeypatch):
    steps = Generation.__next__
    count = 0

    def interrupted(self: Generation) -> list[bytes]:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return steps(self)

    words = "generate run --interactive --max-new-tokens 6 --temperature 0"
    monkeypatch.setattr("sys.stdin", io.StringIO("aaa\n"))
    whole = nsa(words)
    monkeypatch.setattr(Generation, "__next__", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("aaa\nbb\n"))
    first, second = nsa(words).splitlines()
    assert first == whole[:3]
    assert len(second) == 6


# --- where the layers looked ----------------------------------------------------------------------


def test_show_selection(here, nsa, refusal, capsys):
    words = "generate run --max-new-tokens 12 --temperature 0 --prompt"
    prompt = "a bb ccc dddd eeeee " * 5
    expected = nsa(f"{words} '{prompt}'")
    assert cli.main([*words.split(), prompt, "--show-selection"]) == 0
    said = capsys.readouterr()
    assert said.out == expected
    speed, title, layer, picture = said.err.splitlines()
    assert speed.startswith("prefill 100 tokens")
    assert "blocks selected for token 111 of the text (blocks of 16 tokens" in title
    ((bar, ranges),) = re.findall(r"^layer  0 \|([ █]{7})\| ([\d: ]+)$", layer)
    blocks = {block for block, mark in enumerate(bar) if mark == "█"}
    pairs = [tuple(map(int, pair.split(":"))) for pair in ranges.split()]
    assert {token // 16 for start, end in pairs for token in range(start, end)} == blocks
    assert {0, 5, 6} <= blocks
    assert len(blocks) == 4
    assert pairs[-1][1] == 111
    assert picture == "heat maps: selection.png"
    assert Path("selection.png").read_bytes().startswith(PNG)
    nsa(f"{words} x --selection-png other.png")
    assert Path("other.png").read_bytes().startswith(PNG)
    assert sorted(path.suffix for path in here.iterdir() if path.is_file()) == [".png", ".png"]
    several = refusal(f"{words} a --prompt b --show-selection")
    assert "--show-selection must go with one prompt, got 2" in several
    nowhere = refusal(f"{words} a --selection-png none/a.png")
    rule = "--selection-png must name a file in an existing folder, got"
    assert f"{rule} none/a.png" in nowhere
    assert f"{rule} dense" in refusal(f"{words} a --selection-png dense")
    dense = refusal("generate dense --prompt a --show-selection")
    assert "--show-selection must be left out for a model without the selected branch" in dense


def test_inspect_writes_a_page_and_json(here, nsa, refusal, monkeypatch):
    said = nsa("inspect run --output page.html")
    assert said.startswith("checkpoint: step 4 of run, on cpu in fp32; 64 tokens of validation")
    assert re.search(r"layer 0: gates cmp 0\.\d{3}, slc 0\.\d{3}, win 0\.\d{3} \| ", said)
    assert said.endswith("page: page.html\n")
    assert Path("page.html").read_text().startswith("<!DOCTYPE html>")
    text = "a bb ccc dddd eeeee " * 30
    Path("text.txt").write_text(text)
    found = json.loads(nsa("inspect run --text text.txt --tokens 200 --json --record blocks.npz"))
    layers, block_size = load_selections(Path("blocks.npz"))
    assert len(layers) == len(found["layers"])
    assert (layers[0].shape[0], block_size) == (200, found["layers"][0]["selection"]["block_size"])
    assert (found["num_tokens"], found["checkpoint_step"], found["text"]) == (200, 4, "text.txt")
    assert Path("run/inspection.html").is_file()
    pipe(monkeypatch, text.encode())
    again = json.loads(nsa("inspect run --text - --tokens 200 --json"))
    assert again == {**found, "text": "standard input"}
    assert json.loads(nsa("inspect run --checkpoint 2 --text text.txt --json")) != found
    for words, answer in (
        ("inspect dense", "RUN must be a run of a model with attention nsa, got dense"),
        ("inspect run --tokens 1", "--tokens must be above 1, got 1"),
        ("inspect run --tokens 9999999", "--tokens must fit into the validation text"),
        ("inspect run --text none.txt", "--text must name an existing file"),
        ("inspect run --checkpoint 9", "--checkpoint must be last, best or one of 2, 4, got 9"),
        ("inspect run --record none/a.npz", "--record must name a new file in an existing folder"),
    ):
        assert answer in refusal(words)
    Path("run/inspection.html").unlink()
    before = Path("blocks.npz").read_bytes()
    why = "--record must name a new file in an existing folder, got blocks.npz"
    assert why in refusal("inspect run --text text.txt --record blocks.npz")
    assert Path("blocks.npz").read_bytes() == before
    assert not Path("run/inspection.html").exists(), "refused before anything is computed"
