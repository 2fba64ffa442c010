"""Kernels run in Triton's interpreter here: `make test` gives these tests a process of their own, with TRITON_INTERPRET=1."""

from __future__ import annotations

import triton

collect_ignore_glob = [] if triton.knobs.runtime.interpret else ["test_*.py"]
