"""Links of the pages resolve, their short programs run, and their trees are those on disk."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

import pytest
import torch

from tests.test_house_rules import ROOT

MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def fences(page: str, language: str) -> list[str]:
    """Contents of the code blocks of a page in a language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_links_resolve():
    broken = []
    for path in MARKDOWN:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name, anchor in re.findall(r"\]\((?![a-z]+:)([^)\s#]*)#?([^)\s]*)\)", text):
            file = (path.parent / name).resolve() if name else path
            known = [anchor]
            if anchor and file.exists():
                headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
                known = [re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings]
            if not file.exists() or anchor not in known:
                broken.append(f"{path.name}: {name}#{anchor}")
    assert not broken


def run_program(page: str) -> tuple[dict[str, Any], str]:
    """Variables and output of the first Python program of a page."""
    found = dict[str, Any]()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(fences(page, "python")[0], page, "exec"), found)
    return found, out.getvalue()


def test_readme_example_runs():
    found, _ = run_program("README.md")
    assert found["y"].shape == (2, 1024, 256)
    torch.testing.assert_close(found["step"], found["y"][:, 1000:1001], rtol=1e-4, atol=1e-6)


def test_packed_and_padded_example_runs():
    found, _ = run_program("docs/use.md")  # its second program loads an export: tests/hf
    attention, x = found["attention"], found["x"]
    alone = attention(x.flatten(0, 1)[300:][None])[0]
    torch.testing.assert_close(found["packed"][300:], alone, rtol=1e-4, atol=1e-6)
    alone = attention(x[:1, :700])
    torch.testing.assert_close(found["padded"][:1, :700], alone, rtol=1e-4, atol=1e-6)


def test_the_program_of_one_query_prints_what_page_and_picture_show():
    _, printed = run_program("docs/one-query.md")
    assert [printed] == fences("docs/one-query.md", "text")
    (blocks,) = re.findall(r"selected blocks: (.*)", printed)
    picture = (ROOT / "docs/images/one-query.svg").read_text(encoding="utf-8")
    assert re.findall(r'id="block-(\d+)"', picture) == [str(block) for block in json.loads(blocks)]


# Pages with a tree of folders, and the folders whose own folders must all be in it.
TREES = {"README.md": ("", "nsa/"), "docs/design.md": ("nsa/ops/", "nsa/train/")}
TOP = {"nsa", "benchmarks", "docs", "examples", "tests", "tools", "requirements"}


@pytest.mark.parametrize("page", TREES)
def test_tree_of_a_page_is_that_on_disk(page):
    listed, above = set[str](), list[str]()
    for line in (line for fence in fences(page, "text") for line in fence.splitlines()):
        if found := re.match(r"((?:  )*)([\w/]+/)(?:\s|$)", line):
            above[len(found[1]) // 2 :] = [found[2]]
            listed.add("".join(above))
    assert listed
    assert not [folder for folder in listed if not (ROOT / folder).is_dir()]
    folders = [
        path for top in TREES[page] for path in (ROOT / top).iterdir() if any(path.glob("*.*"))
    ]
    inside = {f"{path.relative_to(ROOT)}/" for path in folders if path.name != "__pycache__"}
    assert {path for path in inside if path.split("/")[0] in TOP} <= listed
