"""What the Triton kernels share: tile loads, sequences, range attention, tuning."""
