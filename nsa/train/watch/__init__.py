"""Signals, hangs, lack of memory, and warnings about how a run goes."""
