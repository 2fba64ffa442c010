"""What lies in a run folder, and what reads it."""
