"""SIGKILL at any moment, also while a checkpoint is being written: the resumed run is the
undisturbed one, bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.cases import Nsa, outcome, steps_of, undisturbed

STEPS, EVERY = 30, 2  # of a run, from one checkpoint to the next


def _kill(nsa: Nsa, path: Path, rng: random.Random) -> bool:
    """At a random moment, often one at which a checkpoint is being written; False if the run ended
    before.
    """
    nsa.wait_until((path / "config.yaml").exists, poll_s=0.002)
    # Counted in checkpoints: on a loaded machine no time is like another.
    step = EVERY * rng.randrange(STEPS // EVERY)
    nsa.wait_until(lambda: max(steps_of(path), default=0) >= step, poll_s=0.001)
    time.sleep(rng.uniform(0, 0.1))
    if rng.random() < 0.5:
        checkpoints = path / "checkpoints"
        nsa.wait_until(lambda: any(name[0] == "." for name in os.listdir(checkpoints)), poll_s=0)
    nsa.process.kill()
    nsa.process.join()
    return nsa.process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "seed"),
    [(2, 1), *(pytest.param(10, 100 + part, marks=pytest.mark.faults) for part in range(10))],
)
def test_killed_at_random_moments(tmp_path, number, seed):
    """Kill and resume runs; all must end like an undisturbed one."""
    rng, done, without = random.Random(seed), 0, 0
    expected = outcome(undisturbed(tmp_path, steps=STEPS, checkpoint_every=EVERY))
    while done < number:
        path, said = tmp_path / f"run-{done}", tmp_path / f"said-{done}"
        words: list[str | Path] = ["train", tmp_path / "tiny.yaml", "--run-dir", path]
        env: dict[str, str] = {}
        with Nsa(*words, said=said) as nsa:
            killed = _kill(nsa, path, rng)
        if not killed:
            shutil.rmtree(path)
            continue
        if steps_of(path):
            words = ["train", "--resume", path]
        else:  # the same command again, as from torchrun
            without += 1
            env = {"TORCHELASTIC_RESTART_COUNT": "1"}
        with Nsa(*words, said=said, env=env) as nsa:
            assert nsa.end() == 0, nsa.text
        assert outcome(path) == expected, f"run {done} of seed {seed}"
        done += 1
    assert without < max(number / 2, 2), "hardly any of the killed runs had a checkpoint"
