"""Measurements: this program against others, and what a machine can do. Run by hand (docs/benchmarks/README.md)."""
