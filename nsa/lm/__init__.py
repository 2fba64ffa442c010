"""Decoder language model with sparse or dense attention, readable without the kernels."""
