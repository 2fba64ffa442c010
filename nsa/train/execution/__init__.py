"""Execution of a training step: precision, compilation, CUDA graphs, recomputation."""
