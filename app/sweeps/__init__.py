"""Sweeps: one command, many runs, each a process of its own. Nothing here imports torch."""
