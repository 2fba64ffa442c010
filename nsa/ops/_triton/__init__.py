"""Code that all Triton kernels share: launches, tile loads, sequences, tuning."""
