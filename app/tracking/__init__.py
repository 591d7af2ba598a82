"""Records of a run for people and for other programs. Nothing here imports torch."""
