"""What a run writes: metrics, console lines, loggers, checkpoints' schedule, report."""
