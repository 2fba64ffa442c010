"""Trainings that show what models learn, and tables of their results."""
