"""One command, many runs: each trial is a process of its own. Nothing here imports torch."""
