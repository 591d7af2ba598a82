"""Output files, console and trackers of a run. Nothing here imports torch."""
