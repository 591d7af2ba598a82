"""The fixtures of tests/training."""

from tests.training.conftest import data, folder, loader_of, make_loop, packed_loader_of, runtime, tokenizer

__all__ = ["data", "folder", "loader_of", "make_loop", "packed_loader_of", "runtime", "tokenizer"]
