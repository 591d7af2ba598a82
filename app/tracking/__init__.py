"""What a run writes for people and for other programs. Nothing here imports torch."""
