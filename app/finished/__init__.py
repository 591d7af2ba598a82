"""Trained models: merged, saved, loaded again, and asked for answers."""
