"""The documents tell the truth: links resolve, the README's example runs, its tree is the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

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


def test_readme_example_runs() -> None:
    code, _ = re.findall(  # the other one loads an export: tests/hf
        r"^```python\n(.*?)^```",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    found: dict[str, torch.Tensor] = {}
    exec(compile(code, "README.md", "exec"), found)
    assert found["y"].shape == (2, 1024, 256)
    assert found["z"].shape == (2048, 256)
    torch.testing.assert_close(found["step"], found["y"][:, 1000:1001], rtol=1e-4, atol=1e-6)


def tree_entries(text: str) -> set[str]:
    """Folders of the README's tree: a fence marked ``text``, a line for each name and a remark."""
    (fence,) = re.findall(
        r"^## The tree\n.*?^```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE
    )
    folders: list[str] = []
    entries = set()
    for line in fence.splitlines():
        indent = len(line) - len(line.lstrip())
        name = line.split()[0]
        assert indent % 2 == 0, line
        assert name.endswith("/"), line
        del folders[indent // 2 :]
        folders.append(name)
        entries.add("".join(folders))
    return entries


FOLDERS = ("nsa", "benchmarks", "docs", "tests", "tools", "requirements")
DETAILED = ("nsa/", "nsa/ops/", "nsa/train/")  # every folder in these has a line


def tree_faults(entries: set[str], files: set[str]) -> list[str]:
    """Folders without a line and lines without a folder."""
    folders = {
        f"{parent}/" for file in files for parent in Path(file).parents if str(parent) != "."
    }
    wanted = {folder for folder in folders if f"{Path(folder).parent}/" in (*DETAILED, "./")}
    missing, gone = sorted(wanted - entries), sorted(entries - folders)
    return [f"not in the tree: {folder}" for folder in missing] + [
        f"in the tree only: {folder}" for folder in gone
    ]


def test_readme_tree_is_the_tree() -> None:
    files = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in ROOT.glob(f"{folder}/**/*")
        if path.is_file()
    }
    files = {file for file in files if "__pycache__" not in file}
    assert not tree_faults(tree_entries((ROOT / "README.md").read_text(encoding="utf-8")), files)


def test_tree_faults_are_seen() -> None:
    entries = tree_entries(
        "## The tree\n\n```text\nnsa/  library\n  ops/  all of it\n    c/ one\n  gone/  x\n```\n"
    )
    files = {
        "nsa/__init__.py",
        "nsa/a.py",
        "nsa/ops/b.py",
        "nsa/ops/c/d.py",
        "nsa/ops/c/e/d.py",
        "nsa/new/a.py",
    }
    assert tree_faults(entries, files) == [
        "not in the tree: nsa/new/",
        "in the tree only: nsa/gone/",
    ]
