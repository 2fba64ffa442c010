"""On Windows the library imports and its reference computes; training is refused in one line.

A subprocess removes what Windows lacks, after it has loaded the libraries that this one needs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.bench.test_train import write_config

ROOT = Path(__file__).resolve().parents[1]

FAKE = r"""
import contextlib, faulthandler, importlib, io, json, os, pkgutil, signal, sys
import concurrent.futures.process, multiprocessing.connection, multiprocessing.context
import matplotlib.figure, numpy, rich.console, rich.progress, safetensors.torch, tokenizers, yaml
import tensorboard.backend.event_processing.event_file_loader
import torch.utils.tensorboard
import torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.run, torch.profiler
import torch._inductor.compile_fx, torch._inductor.cpp_builder, torch.testing
import transformers.generation, transformers.modeling_utils, transformers.models.auto.modeling_auto

sys.platform = "win32"
ABSENT = ("triton", "fcntl", "resource", "termios", "pwd", "grp")
for name in [*sys.modules]:
    if name.partition(".")[0] in ABSENT:
        sys.modules[name] = None
sys.modules.update(dict.fromkeys(ABSENT))
for module, names in (
    (signal, "SIGHUP SIGUSR1 SIGUSR2 SIGPIPE SIGKILL SIGVTALRM SIGALRM SIGCHLD SIGSTOP SIGCONT"),
    (signal, "siginterrupt pthread_sigmask setitimer alarm pause"),
    (os, "fork forkpty killpg getuid geteuid setsid getpgid sysconf sysconf_names"),
    (os, "sched_getaffinity posix_spawn wait3 wait4 mkfifo uname"),
    (faulthandler, "register unregister"),
):
    for name in names.split():
        delattr(module, name)

import nsa

absent = {}
for found in pkgutil.walk_packages(nsa.__path__, "nsa."):
    if found.name != "nsa.__main__":
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            absent[found.name] = error.name

from nsa import cli

config = nsa.NSAConfig(num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16)
layer = nsa.NativeSparseAttention(32, config)
layer(torch.randn(70, 32)).sum().backward()
try:
    x = torch.zeros(3, 1)
    nsa.combine(x[None], None, None, torch.ones(1, 3, 3), backend="triton")
except ValueError as error:
    triton = str(error)

said = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    said.append((code, out.getvalue(), err.getvalue()))
gradient = float(layer.q_proj.weight.grad.norm())
print(json.dumps({"absent": absent, "gradient": gradient, "triton": triton, "said": said}))
"""


def test_windows(tmp_path):
    config, run = str(write_config(tmp_path)), str(tmp_path / "run")
    refused = [
        ["train", config, "--run-dir", run],
        ["profile", config, "--run-dir", run],
        ["bench", "train", "--config", config, "--steps", "1"],
        ["data", "prepare", str(tmp_path / "text"), "--out", str(tmp_path / "data")],
    ]
    words = [sys.executable, "-c", FAKE, json.dumps([*refused, ["doctor"]])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Everything but kernels is imported, and only Triton is missing.
    assert {name.partition(".")[0] for name in found["absent"].values()} == {"triton"}
    kernels = re.compile(
        r".*\.(kernels|_triton\.\w+|range\.launch|selected\.(launch|tiled|gathered\w*)"
        r"|selection\.(fp8|launch|random|token_max|two_stage)|shared_kv|index_loss\.(dense_kernels|launch)"
        r"|decode\.(append|launch|layout|merge|scan|select))"
    )
    assert not [name for name in found["absent"] if not kernels.fullmatch(name)]
    assert found["gradient"] > 0
    assert 'must lie on a CUDA GPU for backend="triton"' in found["triton"]
    *said, (code, doctor, _) = found["said"]
    assert code == 0
    assert "cpu: eager PyTorch" in doctor
    rule = "the platform must be Linux or macOS, got Windows."
    for code, _, line in said:
        assert (code, line.count("\n")) == (2, 1)
        assert line.startswith((rule, f"nsa: {rule}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text", "tiny.yaml"]
