"""Output of a run: metrics, log, progress."""
