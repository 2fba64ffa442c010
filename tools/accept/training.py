"""Cases that train: ``make train``, and configurations as they ship."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nsa.train.config import TrainConfig
from nsa.train.load import load_config
from tools.accept.case import Case, Finding
from tools.accept.figures import plan_faults, run_figures, training_faults
from tools.accept.programs import Ended, last_lines, run_program
from tools.accept.setting import NSA, PYTHON, TORCHRUN, Setting, caches
from tools.accept.shards import find_shards

QUICK_STEPS, FULL_STEPS = 60, 300
QUICK_LOG_EVERY = 5
PLAN_LIMIT_S = 150.0
MIB = 2**20


def train(case: Case, setting: Setting) -> Finding:
    """Train as a configuration file says, for a number of steps."""
    folder = setting.empty_folder(case.name)
    settings = load_config(case.config)
    spread = processes_words(settings, setting.machine.num_gpus)
    processes = _given(spread, "--world-size", settings.world_size)
    added = [*_length_words(case, settings, processes, quick=setting.is_quick), *spread]
    words = [*_launcher(processes), "train", case.config, "--run-dir", str(folder / "run"), *added]
    if settings.data.source == "shards":
        prepared = find_shards(setting)
        if prepared.fault:
            return Finding(prepared.log, faults=(prepared.fault,))
        words += ["--data.path", str(prepared.folder)]
        added.append("--data.path SHARDS")
    ended = setting.run(words, folder / "log.txt", case.limit_s)
    steps = _given(added, "--steps", settings.steps)
    on_gpu = setting.machine.num_gpus > 0 and settings.device != "cpu"
    return _judge(case, setting, ended, steps=steps, on_gpu=on_gpu, added=added)


def make_train(case: Case, setting: Setting) -> Finding:
    """``make train`` from start to finish, with compile caches that are empty."""
    folder = setting.empty_folder(case.name)
    cold = folder / "cold"
    arguments = shlex.join(["--run-dir", str(folder / "run")])
    words = ["make", "train", f"PYTHON={PYTHON}", f"ARGS={arguments}", "CONFIG="]
    ended = setting.run(words, folder / "log.txt", case.limit_s, caches(cold))
    shutil.rmtree(cold, ignore_errors=True)
    steps = load_config(case.config).steps
    on_gpu = setting.machine.num_gpus > 0
    return _judge(case, setting, ended, steps=steps, on_gpu=on_gpu, added=())


def _judge(
    case: Case,
    setting: Setting,
    ended: Ended,
    *,
    steps: int,
    on_gpu: bool,
    added: Sequence[str],
) -> Finding:
    folder = setting.folder(case.name)
    figures = run_figures(folder / "run")
    plan_mib = setting.plans.get(case.config)
    faults = [ended.fault] if ended.fault else []
    faults += training_faults(figures, steps=steps, gpu_expected=on_gpu)
    faults += plan_faults(figures, plan_mib)
    remarks = [f"added: {' '.join(added)}" if added else "as it ships"]
    if figures.first_step_s is not None:
        remarks.append(f"first step after {figures.first_step_s:.1f} s")
    return Finding(folder / "log.txt", figures, plan_mib, tuple(remarks), tuple(faults))


def processes_words(settings: TrainConfig, num_gpus: int) -> list[str]:
    """Words that spread a run of several processes over all GPUs that its micro-batches can use."""
    processes, accumulation = settings.world_size, settings.accumulation
    while processes > 1 and accumulation % 2 == 0 and 2 * processes <= num_gpus:
        processes, accumulation = 2 * processes, accumulation // 2
    if processes == settings.world_size:
        return []
    return ["--world-size", str(processes), "--accumulation", str(accumulation)]


def _length_words(case: Case, settings: TrainConfig, processes: int, *, quick: bool) -> list[str]:
    """Words that make a run as short as the acceptance run has it, with an early row."""
    steps = QUICK_STEPS if quick else FULL_STEPS
    if case.steps_on_two is not None and processes == 2:
        steps = case.steps_on_two
    words = [] if steps == settings.steps else ["--steps", str(steps)]
    if quick and (settings.log_every == 0 or settings.log_every > QUICK_LOG_EVERY):
        words += ["--log-every", str(QUICK_LOG_EVERY)]
    return words


def _launcher(processes: int) -> Sequence[str]:
    return NSA if processes == 1 else (*TORCHRUN, str(processes), *NSA[1:])


def _given(added: Sequence[str], option: str, otherwise: int) -> int:
    """A number from the words that were added."""
    return int(added[added.index(option) + 1]) if option in added else otherwise


def make_plans(setting: Setting, configs: Iterable[str]) -> None:
    """Have ``nsa plan`` say the peak of each configuration, several at a time."""
    if not setting.machine.num_gpus:  # no peak is measured on a CPU
        return
    wanted = sorted({*configs} - setting.plans.keys())
    if not wanted:
        return
    setting.say(f"nsa plan, of {len(wanted)} configurations")
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 4, 1)) as pool:
        peaks = pool.map(lambda config: _plan(setting, config), wanted)
        setting.plans.update(zip(wanted, peaks, strict=True))


def _plan(setting: Setting, config: str) -> float | None:
    """Planned peak in MiB; None where there is none, and the reason is said."""
    log = setting.cases / "plans" / f"{Path(config).stem}.txt"
    log.unlink(missing_ok=True)
    spread = processes_words(load_config(config), setting.machine.num_gpus)
    words = [*NSA, "plan", config, "--json", *spread]
    ended = run_program(words, log, setting.seconds_left(PLAN_LIMIT_S), env=setting.env)
    found = [line for line in last_lines(log, 20) if line.startswith("{")]
    if ended.fault or not found:
        setting.say(f"    nsa plan {config}: {ended.fault or 'no JSON'}, see {log}")
        return None
    return float(json.loads(found[-1])["memory_bytes"]["peak"]) / MIB
