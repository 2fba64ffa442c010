"""What holds for every test: one thread, fixed examples."""

from __future__ import annotations

import os

import hypothesis
import torch

# Two test processes share the machine; the programs that tests start inherit the setting.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# The same examples in every run: a red test stays red until it is mended. Deadlines measure the machine, not the code.
hypothesis.settings.register_profile("nsa", derandomize=True, database=None, deadline=None, max_examples=50)
hypothesis.settings.load_profile("nsa")
