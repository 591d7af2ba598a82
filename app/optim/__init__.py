"""Optimizers, learning-rate schedules, and optimizer state as plain tensors."""
