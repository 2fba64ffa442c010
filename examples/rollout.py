"""Take a training run from a smoke test through a canary to production.

python examples/rollout.py 117m-fineweb runs/main
python examples/rollout.py 78m runs/main --canary 1000 --world-size 2 --accumulation 1

1. nsa doctor and nsa plan must accept the machine and the configuration.
2. Smoke test, in RUN-smoke: a process is killed after the first checkpoint. torchrun must restart
   it, and the run must resume, finish and agree with its records.
3. Canary, the first steps of RUN: see `problems`. On no-go the run stops with a checkpoint.
4. Production: the same run continues.

The exit code is 1 after a no-go, otherwise that of the training.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, NoReturn

Training = subprocess.Popen[bytes]
SMOKE = {"--steps": "60", "--optim.warmup-steps": "10", "--log-every": "10", "--eval-every": "30"}
SMOKE["--checkpoint-every"] = "10"
# Other events are a no-go, also a resumption.
ORDINARY = {"start", "stage", "index_loss", "checkpoint", "best", "stop", "finish"}


def main() -> int:
    """Run the four steps; return the exit code of the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="name of a configuration or a YAML file")
    parser.add_argument("run", type=Path, help="run folder to create")
    parser.add_argument("--canary", type=int, default=300, help="steps before the decision")
    options, words = parser.parse_known_args()  # the others are settings of the configuration
    if len(words) % 2:
        parser.error("give each setting as --name value")
    settings = dict(zip(words[::2], words[1::2], strict=True))

    nsa("doctor")
    plan = json.loads(nsa("plan", options.config, "--json", *words))
    smoke_test(options.config, options.run, settings, plan["gpus"])

    training = train(plan["gpus"], options.config, options.run, settings)
    signal.signal(signal.SIGTERM, lambda *_: training.terminate())
    rows: list[dict[str, Any]] = []
    while training.poll() is None and not (rows and rows[-1]["step"] >= options.canary):
        time.sleep(1)
        rows = read(options.run / "metrics.jsonl")
    if training.returncode:
        no_go(f"the training ended with exit code {training.returncode}")
    if found := problems(rows, read(options.run / "events.jsonl"), plan):
        if training.poll() is None:
            (options.run / "halt").touch()
        training.wait()
        no_go(f"{'; '.join(found)}. To continue anyway, resume {options.run}.")
    print(f"go: canary of {rows[-1]['step']} steps; {options.run} continues", flush=True)
    return training.wait()


def smoke_test(config: str, run: Path, settings: dict[str, str], processes: int) -> None:
    """Train some steps in RUN-smoke, with a process killed after the first checkpoint."""
    smoke = run.resolve().with_name(f"{run.name}-smoke")
    training = train(processes, config, smoke, {**settings, **SMOKE})
    while training.poll() is None and not any(smoke.glob("checkpoints/step-*")):
        time.sleep(0.02)
    subprocess.run(["pkill", "-KILL", "-nf", f"nsa train.*{smoke}"], check=False)  # the newest
    if training.wait():
        no_go(f"the smoke test ended with exit code {training.returncode}, see {smoke}")
    if "resume" not in (event["kind"] for event in read(smoke / "events.jsonl")):
        no_go(f"the smoke test was not resumed, see {smoke}")
    nsa("check", str(smoke))
    shutil.rmtree(smoke)
    print("go: smoke test", flush=True)


def problems(
    rows: list[dict[str, Any]], events: list[dict[str, Any]], plan: dict[str, Any]
) -> list[str]:
    """Reasons against production: loss, updates, speed, memory, and unexpected events."""
    before, after = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    if not before:
        return ["the canary needs at least two rows: give a larger --canary or smaller --log-every"]
    found = [f"{x['kind']}: {x['message']}" for x in events if x["kind"] not in ORDINARY]
    losses = [mean(row["loss_nats"] for row in part) for part in (before, after)]
    if not losses[1] < losses[0]:
        found.append(f"the loss does not fall: {losses[0]:.3f}, then {losses[1]:.3f} nats")
    if skipped := max(row["nonfinite_steps"] for row in rows):
        found.append(f"{skipped} steps were not finite")
    speed, planned = median(row["tokens_per_s"] for row in after), plan["tokens_per_s"] or 0
    if speed < 0.9 * planned:
        found.append(f"{speed:,.0f} tokens/s, below 90% of the planned {planned:,.0f}")
    peak = max(row.get("memory_reserved_mib", 0) for row in rows) * 2**20
    if peak > 0.9 * (plan["gpu_memory_bytes"] or float("inf")):
        found.append(f"{peak / 2**30:.1f} GiB, above 90% of the GPU's memory")
    return found


def train(processes: int, config: str, run: Path, settings: dict[str, str]) -> Training:
    """Start a training under torchrun, which restarts it three times."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(processes), "--max-restarts", "3"]
    words = [word for setting in settings.items() for word in setting]
    command = ["-m", "nsa", "train", config, "--quiet", "--run-dir", str(run), *words]
    return subprocess.Popen([*torchrun, *command])


def nsa(*words: str) -> str:
    """Output of a command that must succeed."""
    command = [sys.executable, "-m", "nsa", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        no_go(f"nsa {' '.join(words)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def read(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a file that may not exist yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def no_go(reason: str) -> NoReturn:
    """End with exit code 1."""
    sys.exit(f"no-go: {reason}")


if __name__ == "__main__":
    sys.exit(main())
