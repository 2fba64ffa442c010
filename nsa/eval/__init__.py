"""Evaluation: bits per byte of held-out text, generation."""
