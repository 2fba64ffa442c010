"""Compiles the Triton kernels for GPUs that are not present, and checks their resources."""
