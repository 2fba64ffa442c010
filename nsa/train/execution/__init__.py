"""How a step runs: precision, compilation, CUDA graphs, recomputation."""
