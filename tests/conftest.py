"""Settings of every test: one thread, and the same random examples in every run."""

from __future__ import annotations

import gc
import os
import sys
from multiprocessing import forkserver

import hypothesis
import pytest
import torch

# Two test processes share the machine; the programs that tests start inherit the setting.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# The same examples in every run: a failing test keeps failing until it is repaired. Deadlines
# measure the machine, not the code.
hypothesis.settings.register_profile(
    "nsa", derandomize=True, database=None, deadline=None, max_examples=50
)
hypothesis.settings.load_profile("nsa")

# Processes are forked from one that has imported what they need: a start takes a tenth of a second
# instead of four. All tests of a process share it, so none may set another list.
forkserver.set_forkserver_preload(["tests.faults.preload"])
forkserver.set_forkserver_preload = lambda modules_names: None

# Imported modules are not garbage: keep the collector from searching them, and from running often.
gc.disable()
gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def forget_plans():
    """A test may change what launchers' plans are made of, such as sizes of tiles."""
    plan = sys.modules.get("nsa.ops._plan")
    for plans in [] if plan is None else plan.PLANS:
        plans.clear()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
