"""Scores of rows, and comparison of models."""
