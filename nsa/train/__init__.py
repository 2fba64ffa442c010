"""Training: configuration, data, trainer, checkpoints, telemetry."""
