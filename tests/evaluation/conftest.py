"""The fixtures of tests/training."""

from tests.training.conftest import data, runtime, tokenizer

__all__ = ["data", "runtime", "tokenizer"]
