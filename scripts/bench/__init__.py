"""Measurements against other programs; run by hand."""
