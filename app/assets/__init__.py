"""What ships with the program: the small model, its tokenizer, the sample data, chat templates."""

from pathlib import Path

PREFIX = "asset:"
ROOT = Path(__file__).parent


def locate(path: str) -> str:
    """The real place of an `asset:NAME` path; any other path as it is."""
    return str(ROOT / path.removeprefix(PREFIX)) if path.startswith(PREFIX) else path
