"""A decode step: new tokens go into the cache, and their queries read it, on kernels of its own."""

from __future__ import annotations

# Tokens of a sequence in one step, at most.
MOST_QUERIES = 8
