"""docs/problems.md quotes messages; each must be one that the program gives."""

import ast
import re

from tests.conftest import REPO


def _quoted() -> list[str]:
    """The messages in the first column, in the parts that a value or a gap leaves."""
    rows = re.findall(r"^\| (.*?) \| ", (REPO / "docs" / "problems.md").read_text(), re.MULTILINE)
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row) if " " in quote]
    return [part.strip() for quote in quotes for part in quote.split("...")]


def _texts() -> list[str]:
    """Every text in the program, and the scripts."""
    trees = [ast.parse(file.read_text()) for file in (REPO / "app").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [str(node.value) for node in nodes] + [(REPO / "scripts" / "setup").read_text()]


def test_quoted_messages_are_in_the_program() -> None:
    quoted, texts = _quoted(), _texts()
    assert len(quoted) > 8
    assert [part for part in quoted if not any(part in text for text in texts)] == []
