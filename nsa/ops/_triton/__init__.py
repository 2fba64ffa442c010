"""Code shared by all Triton kernels: launches, tile loads, sequences, tuning."""
