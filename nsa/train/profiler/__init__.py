"""``nsa profile``: where the time of a training step goes, seen from the training process."""
