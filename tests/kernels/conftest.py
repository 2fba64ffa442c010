"""Kernels run in Triton's interpreter here: `make test` gives these tests a process of their own,
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import triton

from tests.kernels import quick_interpreter

collect_ignore_glob = [] if triton.knobs.runtime.interpret else ["test_*.py"]
if triton.knobs.runtime.interpret:
    quick_interpreter.install()
