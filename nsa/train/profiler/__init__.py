"""``nsa profile``: where the time of a training step goes, seen from inside the training process."""
