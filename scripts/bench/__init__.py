"""Benchmarks of this program, other programs and machines. Run by hand (docs/benchmarks/README.md)."""
