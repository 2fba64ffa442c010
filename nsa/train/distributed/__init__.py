"""Processes that train one model."""
