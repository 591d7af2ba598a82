"""The fixtures of tests/engine."""

from tests.engine.conftest import data, folder, loader_of, make_loop, packed_loader_of, runtime, tokenizer

__all__ = ["data", "folder", "loader_of", "make_loop", "packed_loader_of", "runtime", "tokenizer"]
