"""Evidence that a model trained here learns as well as a dense one: trainings, rows, a report."""
