"""Memory planner: traces one training step on fake tensors and counts its bytes and FLOPs."""
