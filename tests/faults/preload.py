"""What the process loads from which the tests fork theirs, once for all of them."""

from __future__ import annotations

import datasets  # noqa: F401
import numpy.random  # noqa: F401
import torch._dynamo.convert_frame
import torch.profiler  # noqa: F401

import nsa.cli
import nsa.train.data
import nsa.train.telemetry.progress
import nsa.train.trainer  # noqa: F401
from nsa.train.load import load_config

load_config()  # makes the model of the configuration
