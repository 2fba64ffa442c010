"""Signals, hangs, out-of-memory errors and warnings of a run."""
