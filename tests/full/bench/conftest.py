"""The fixtures of tests/bench."""

from tests.bench.conftest import bench, quick_python

__all__ = ["bench", "quick_python"]
