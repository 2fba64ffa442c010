"""Links of the pages resolve, their short programs run, and their trees are the tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from nsa import NativeSparseAttention
from tests.test_house_rules import MARKDOWN, ROOT


def broken_links(path: Path, text: str) -> list[str]:
    """Relative links of a Markdown file whose file or heading does not exist."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            found.append(f"{path.name}: {target}")
        elif anchor:
            headings = re.findall(
                r"^#+ (.+)$",
                text if file == path else file.read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            anchors = {
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            found += [] if anchor in anchors else [f"{path.name}: {target}"]
    return found


def test_links_resolve() -> None:
    assert not [
        line for path in MARKDOWN for line in broken_links(path, path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    "link", ["[a](gone.md)", "[a](#no-such-heading)", "[a](docs/design.md#no-such-heading)"]
)
def test_broken_link_is_seen(link: str) -> None:
    assert broken_links(ROOT / "README.md", f"# Heading\n{link} and [fine](#heading)") == [
        f"README.md: {link[4:-1]}"
    ]


def run_first_program(page: str) -> dict[str, torch.Tensor]:
    """Run the first Python program of a page and return its variables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    found: dict[str, torch.Tensor] = {}
    exec(compile(code, page, "exec"), found)
    return found


def test_readme_example_runs() -> None:
    found = run_first_program("README.md")
    assert found["y"].shape == (2, 1024, 256)
    torch.testing.assert_close(found["step"], found["y"][:, 1000:1001], rtol=1e-4, atol=1e-6)


def test_packed_and_padded_example_runs() -> None:
    found = run_first_program("docs/use.md")  # its second program loads an export: tests/hf
    attention, x = cast(NativeSparseAttention, found["attention"]), found["x"]
    alone = attention(x.flatten(0, 1)[300:][None])[0]
    torch.testing.assert_close(found["packed"][300:], alone, rtol=1e-4, atol=1e-6)
    alone = attention(x[:1, :700])
    torch.testing.assert_close(found["padded"][:1, :700], alone, rtol=1e-4, atol=1e-6)


def tree_entries(text: str) -> set[str]:
    """Folders of a page's trees: fences marked ``text``, a line for each name and a remark."""
    entries = set()
    for fence in re.findall(r"^```text\n([\w/]+/\s.*?)^```", text, re.DOTALL | re.MULTILINE):
        folders: list[str] = []
        for line in fence.splitlines():
            indent = len(line) - len(line.lstrip())
            name = line.split()[0]
            if not indent:
                folders = []
            assert indent % 2 == 0, line
            assert name.endswith("/"), line
            del folders[indent // 2 :]
            folders.append(name)
            entries.add("".join(folders))
    return entries


FOLDERS = ("nsa", "benchmarks", "docs", "examples", "tests", "tools", "requirements")
TREES = {"README.md": ("./", "nsa/"), "docs/design.md": ("nsa/ops/", "nsa/train/")}


def tree_faults(entries: set[str], files: set[str], detailed: Sequence[str]) -> list[str]:
    """Folders in ``detailed`` ones without a line, and lines without a folder."""
    folders = {
        f"{parent}/" for file in files for parent in Path(file).parents if str(parent) != "."
    }
    wanted = {folder for folder in folders if f"{Path(folder).parent}/" in detailed}
    missing, gone = sorted(wanted - entries), sorted(entries - folders)
    return [f"not in the tree: {folder}" for folder in missing] + [
        f"in the tree only: {folder}" for folder in gone
    ]


@pytest.mark.parametrize("page", TREES)
def test_tree_of_a_page_is_the_tree(page: str) -> None:
    paths = (path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*") if path.is_file())
    files = {str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts}
    entries = tree_entries((ROOT / page).read_text(encoding="utf-8"))
    assert entries
    assert not tree_faults(entries, files, TREES[page])


def test_tree_faults_are_seen() -> None:
    entries = tree_entries(
        "```text\nnsa/  library\n  ops/  all of it\n    c/ one\n  gone/  x\n```\n"
    )
    files = {
        "nsa/__init__.py",
        "nsa/a.py",
        "nsa/ops/b.py",
        "nsa/ops/c/d.py",
        "nsa/ops/c/e/d.py",
        "nsa/new/a.py",
    }
    assert tree_faults(entries, files, ("./", "nsa/", "nsa/ops/")) == [
        "not in the tree: nsa/new/",
        "in the tree only: nsa/gone/",
    ]
