"""Scores of rows, and the comparison of models by them."""
