"""What ships with the program: the small model, tokenizers, the sample data, chat templates."""

from pathlib import Path

PREFIX = "asset:"
ROOT = Path(__file__).parent


def locate(path: str) -> str:
    """The real place of an `asset:NAME` path; any other path as it is."""
    return str(ROOT / path.removeprefix(PREFIX)) if path.startswith(PREFIX) else path


def template_names() -> tuple[str, ...]:
    """Names of the chat templates that ship, for `model.chat_template=NAME`."""
    return tuple(sorted(file.stem for file in (ROOT / "templates").glob("*.jinja")))


def template_text(name: str) -> str:
    """A chat template that ships."""
    return (ROOT / "templates" / f"{name}.jinja").read_text(encoding="utf-8").rstrip("\n")
