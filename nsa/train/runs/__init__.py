"""What reads a run folder."""
