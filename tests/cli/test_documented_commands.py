"""Every command of the documents is one that `nsa` takes, with settings that exist."""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from nsa import cli, configs
from nsa.bench.attention import parse_variant, split_variant
from nsa.config import NSAConfig
from nsa.errors import UsageError, UserError
from nsa.train.load import load_config, settings
from tests.train.cases import make_trainer, tiny_config
from tools.measure import MEASUREMENTS

ROOT = Path(__file__).resolve().parents[2]
SEED = NSAConfig()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def commands(text: str) -> Iterator[list[str]]:
    """Words after ``nsa`` of every line behind a ``$`` in a console fence, arrays filled in."""
    arrays: dict[str, list[str]] = {}
    for fence in re.findall(r"^```console\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n", " ", fence).splitlines():
            if not line.startswith("$ "):
                continue
            if found := re.fullmatch(r"\$ (\w+)=\((.*)\)", line):
                arrays[found[1]] = shlex.split(found[2])
                continue
            line = re.sub(r"; done\b|(>.*)?&$|\| .*", "", line[2:])
            words: list[str] = []
            for word in shlex.split(line, comments=True):
                array = re.fullmatch(r"\$\{(\w+)\[@\]\}", word)
                words += [word] if array is None else arrays[array[1]]
            if "nsa" in words:
                yield words[words.index("nsa") + 1 :]


def check_command(words: list[str]) -> None:
    """Words, and the settings of a configuration that exists."""
    found = cli.parse(words)
    assert found is not None, words
    run, arguments = found
    if not any(
        part.kind is part.VAR_KEYWORD for part in inspect.signature(run).parameters.values()
    ):
        return
    known = {setting.name for setting in settings()} - inspect.signature(run).parameters.keys()
    given = {name: text for name, text in arguments.items() if name in known}
    config = arguments["config"]
    paths = config if isinstance(config, tuple | list) else [config]
    for path in set(paths) & set(configs.names()):
        load_config(path, given)
        for text in arguments.get("variant") or []:
            load_config(path, {**given, **split_variant(text)[1]})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_taken(path):
    for words in commands(path.read_text(encoding="utf-8")):
        try:
            check_command(words)
        except (UsageError, UserError) as error:
            pytest.fail(f"{path.name}: nsa {shlex.join(words)}\n{error}")


# Commands that run on a CPU in seconds, on a run that has a documented name.
ON_A_CPU = (
    r"(eval|generate|inspect|report|check|export) runs/cpu-small-1( |$)",
    r"(configs|doctor)$",
    r"plan 78m --gpu h200",
    r"data needles",
)


def run_on_a_cpu() -> tuple[list[str], list[str]]:
    """Quick commands, and those that are marked for a CPU, which measure."""
    texts = [path.read_text(encoding="utf-8") for path in DOCUMENTS]
    lines = [shlex.join(words) for text in texts for words in commands(text)]
    found = [line for line in lines for kind in ON_A_CPU if re.match(kind, line)]
    marked = [line for text in texts for line in re.findall(r"\$ (nsa .*?) +# without a GPU", text)]
    for path in ROOT.glob("nsa/cli/*.py"):
        marked += re.findall(r" (nsa .*?) +\(without a GPU\)", path.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found)), list(dict.fromkeys(line[4:] for line in marked))


QUICK, MARKED = run_on_a_cpu()


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    """A folder with what the commands name."""
    folder = tmp_path_factory.mktemp("documented")
    make_trainer(tiny_config(folder, steps=2), folder / "runs/cpu-small-1").run()
    (folder / "letters.txt").write_text("a letter; " * 40)
    return folder


@pytest.mark.parametrize(
    "line", [*QUICK, *(pytest.param(x, marks=pytest.mark.faults) for x in MARKED)]
)
def test_a_command_for_a_cpu_runs(documented, monkeypatch, line):
    monkeypatch.chdir(documented)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(shlex.split(line)) == 0


def test_commands_that_are_marked_for_a_cpu_are_found():
    assert {line.split()[1] for line in MARKED} == {"attention", "train", "decode"}
    assert len(QUICK) > 10


def test_commands_of_the_measurements_are_taken():
    for text in chain.from_iterable(MEASUREMENTS.values()):
        words = text.split()
        check_command(words)
        if words[:2] == ["bench", "attention"]:
            found = cli.parse(words)
            assert found is not None
            for variant in found[1]["variant"] or []:
                assert dataclasses.replace(SEED, **parse_variant(variant).variant) != SEED


def test_there_are_commands():
    assert sum(1 for path in DOCUMENTS for _ in commands(path.read_text(encoding="utf-8"))) > 60


@pytest.mark.parametrize(
    "line",
    [
        "nsa trian 78m",
        "nsa train 78m --world-siez 2",
        "nsa train 78m --world-size 2",  # its global batch is another
        "torchrun --nproc-per-node 2 -m nsa bench train --paralel.strategy fsdp",
        "nsa bench train --variant eager:compiled=false",
        'nsa bench train "${set[@]}"  # remark',
    ],
)
def test_a_stale_command_is_seen(line):
    (words,) = commands(f"```console\n$ set=(--no.such 1)\n$ {line}\n```\n")
    with pytest.raises((UsageError, UserError)):
        check_command(words)
