"""What the Triton kernels of the operators share: tile loads, sequences, range attention, tuning."""
