"""Commands as they are typed."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa import cli

Command = Callable[[str], str]
TINY = """
model:
  width: 32
  num_layers: 1
  mlp_hidden_size: 32
  nsa:
    {num_heads: 2, num_kv_heads: 1, head_dim: 16, value_dim: 16, compress_block_size: 8,
     compress_stride: 4, block_size: 16, num_selected_blocks: 4, window_size: 32}
data: {source: folder, path: texts}
optim: {warmup_steps: 1}
steps: 4
seq_len: 64
micro_batch: 1
accumulation: 1
global_batch: 1
compute_dtype: fp32
log_every: 1
eval_every: 2
eval_windows: 2
checkpoint_every: 2
sample_tokens: 4
"""


@pytest.fixture
def nsa(capsys):
    """Runs the words after ``nsa`` in this process; gives what was printed."""

    def run(line):
        capsys.readouterr()
        assert cli.main(shlex.split(line)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(capsys):
    """Runs a command that is refused; gives the one line that the mistake ends in."""

    def run(line):
        capsys.readouterr()
        assert cli.main(shlex.split(line)) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert re.match(r"nsa( \w+)*: ", said)
        return said

    return run


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of :func:`tiny`."""
    monkeypatch.chdir(folder)
    (folder / "texts").mkdir()
    for number in range(10):
        text = f"the {number} quick brown foxes jump over the lazy dog; " * 20
        (folder / f"texts/{number}.txt").write_text(text)
    (folder / "tiny.yaml").write_text(TINY)
    return folder


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with a configuration and its texts, in which the commands run."""
    return enter(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run of four steps, which no test changes."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = enter(tmp_path_factory.mktemp("finished"), monkeypatch)
        words = "train tiny.yaml --run-dir run --sample-tokens 0 --optim.lr 0.02"
        assert cli.main(words.split()) == 0
    return folder / "run"


@pytest.fixture
def run(tiny, finished, monkeypatch):
    """The folder of a run of four steps; what is trained from it draws no plot."""
    monkeypatch.setattr("nsa.cli.train._plot", lambda *_: None)
    return shutil.copytree(finished, tiny / "run")


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Standard input holds this."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
