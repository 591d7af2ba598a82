"""Trained models: merging, saving, loading and generation."""
