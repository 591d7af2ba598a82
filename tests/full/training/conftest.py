"""The fixtures of tests/training."""

from tests.training.conftest import data, folder, loader_of, make_loop, runtime, tokenizer

__all__ = ["data", "folder", "loader_of", "make_loop", "runtime", "tokenizer"]
