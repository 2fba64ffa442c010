"""The wheel in environments with exactly what it requires: the core, and the extra ``train``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nsa import configs, extras
from nsa.cli.bench import carried_rows

ROOT = Path(__file__).resolve().parents[1]

MODULE = """
import json, sys
from importlib.metadata import distributions
import torch
from nsa import NativeSparseAttention, NSACache, NSAConfig

config = NSAConfig(num_heads=4, num_kv_heads=2, head_dim=16, value_dim=16, window_size=32,
                   block_size=16, num_selected_blocks=4, compress_block_size=8, compress_stride=4)
attention = NativeSparseAttention(32, config)
x = torch.randn(2, 128, 32, requires_grad=True)
y = attention(x)
y.square().mean().backward()
cache = NSACache(config, num_layers=1, batch_size=2, max_tokens=128)
attention(x[:, :100].detach(), cache=cache.layers[0])
finite = all(p.grad.isfinite().all() and p.grad.norm() > 0 for p in attention.parameters())
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps([list(y.shape), bool(finite), loaded, [x.name for x in distributions()]]))
"""


def needed(*names: str) -> set[str]:
    """Names of distributions of this environment, and of everything that they require."""
    found, waiting = set[str](), [*names]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            found.add(name)
            requirements = map(Requirement, metadata.requires(name) or ())
            waiting += [x.name for x in requirements if not x.marker or x.marker.evaluate()]
    return found


class Installed:
    """A fresh environment with the wheel, into which packages of this one are linked."""

    def __init__(self, folder: Path, wheel: Path, packages: set[str]) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        scheme = {"base": str(folder), "platbase": str(folder)}
        self.site = Path(sysconfig.get_path("purelib", "venv", scheme))
        for package in packages:
            tops = {file.parts[0] for file in metadata.files(package) or ()}
            for top in tops - {"..", "__pycache__"}:
                if not (self.site / top).exists():
                    source = metadata.distribution(package).locate_file(top)
                    (self.site / top).symlink_to(str(source))
        self.pip("install", "--no-index", "--no-deps", str(wheel))

    def pip(self, *words: str) -> str:
        python = str(self.folder / "bin" / "python")
        return self._run([sys.executable, "-m", "pip", "--python", python, *words])

    def __call__(self, *words: str, code: int = 0) -> str:
        """Output of a command, started in a folder without files of this project."""
        return self._run([str(self.folder / "bin" / words[0]), *words[1:]], code)

    def _run(self, words: list[str], code: int = 0) -> str:
        environment = {x: value for x, value in os.environ.items() if not x.startswith("PYTHON")}
        kept: Any = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run(words, cwd=self.folder, check=False, **kept)
        assert done.returncode == code, done.stdout + done.stderr
        return str(done.stderr if code else done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, "."]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("core") / "env", wheel, needed(*extras.CORE))


@pytest.fixture(scope="module")
def train(wheel, tmp_path_factory):
    return Installed(
        tmp_path_factory.mktemp("train") / "env",
        wheel,
        needed(*extras.CORE, *extras.EXTRAS["train"]),
    )


def test_the_core_is_torch_and_triton(core):
    assert core.pip("check").startswith("No broken requirements found")
    shape, finite, modules, listed = json.loads(core("python", "-W", "ignore", "-c", MODULE))
    found = {*map(canonicalize_name, listed)}
    assert found - needed("torch") == {"nsa", *({"triton"} - needed("torch"))}
    assert (shape, finite) == ([2, 128, 32], True)
    assert {"nsa", "torch"} <= {*modules}
    assert not {*modules} & {*extras.EXTRAS["data"].values()}


def test_commands_of_the_core(core):
    assert core("nsa", "--help").startswith("usage: nsa")
    assert core("nsa", "trian", code=2) == "nsa: unrecognized command: trian; did you mean train?\n"
    assert [line.split()[0] for line in core("nsa", "configs").splitlines()] == configs.names()
    said = core("nsa", "doctor")
    assert "no problem found" in said
    assert "data: without numpy, PyYAML, matplotlib, rich, " in said


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train", "cpu-small"], "train"),
        (["plan", "78m"], "train"),
        (["bench", "train"], "train"),
        (["bench", "attention"], "bench"),
        (["data", "prepare", "texts", "--out", "data"], "train"),
    ],
    ids=" ".join,
)
def test_a_missing_extra_is_one_line(core, words, extra):
    line = core("nsa", *words, code=2)
    command = " ".join(words[: 2 if words[0] in ("bench", "data") else 1])
    absent = ", ".join(x for x in extras.EXTRAS[extra] if x not in extras.OPTIONAL)
    hint = f"Install with: pip install 'nsa[{extra}]'"
    assert line == f"nsa {command}: not installed: {absent}. {hint}\n"


def test_ten_steps(train):
    """From a name, in any folder; the extra is enough for the run, its evaluation and its text."""
    words = """--model.num-layers 1 --seq-len 128 --micro-batch 2 --global-batch 2
        --eval-windows 1 --sample-tokens 2 --steps 10 --log-every 5 --optim.warmup-steps 2"""
    assert "finished 10 steps" in train("nsa", "train", "cpu-small", *words.split())
    folder = train.folder / "runs" / "cpu-small-1"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 10]
    assert rows[1]["loss_nats"] < rows[0]["loss_nats"]
    assert (folder / "loss.png").exists()


def test_the_wheel_has_the_demo(wheel):
    with zipfile.ZipFile(wheel) as file:
        packed = {name: file.read(name) for name in file.namelist()}
    for name in ("book.txt.xz", "config.yaml", "model.safetensors"):
        assert packed[f"nsa/demo/{name}"] == (ROOT / "nsa/demo" / name).read_bytes()


def test_the_wheel_has_the_measured_rows(train):
    """They are found from anywhere."""
    code = "from nsa.cli.bench import carried_rows as c; print(*c('results', 'memory'), sep='\\n')"
    carried = [Path(line) for line in train("python", "-c", code).splitlines()]
    committed = carried_rows("results", "memory")
    assert all(path.is_relative_to(train.site) for path in carried)
    assert [path.read_bytes() for path in carried] == [path.read_bytes() for path in committed]
