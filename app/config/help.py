"""Text of `--help`, and meanings of keys and options from the comments of their schema."""

import ast
import inspect
import re

_COMMENT = re.compile(r"#\s+(.*)$")


def meanings(section: type) -> dict[str, str]:
    """Return the documentation of each field: the comment after it, or in the line above."""
    lines = inspect.getsource(section).splitlines()
    (body,) = ast.parse("\n".join(lines)).body
    assert isinstance(body, ast.ClassDef)
    comments = {}
    for statement in body.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            after, above = lines[(statement.end_lineno or 0) - 1], lines[statement.lineno - 2].lstrip()
            if comment := _COMMENT.search(after) or _COMMENT.match(above):
                comments[statement.target.id] = comment[1]
    return comments
