"""Everything that happens over time: processes, steps, evaluations, checkpoints."""
