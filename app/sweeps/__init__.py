"""Sweeps: one command, many runs, each in a separate process. Nothing here imports torch."""
