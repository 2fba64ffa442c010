"""Attention operators: one folder each, every one usable alone."""
