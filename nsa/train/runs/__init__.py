"""Tools that read a run folder."""
