"""A fixture of tests/packaging."""

from tests.packaging.test_wheel import wheel

__all__ = ["wheel"]
