"""The Triton kernels compiled for GPUs that are not there, and what they need of them."""
