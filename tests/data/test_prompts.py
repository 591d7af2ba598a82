"""Prompts from a file, and the problems of files without them."""

from pathlib import Path

import pytest

from app.data.prompts import as_conversation, read_prompt, read_prompts
from app.errors import DataError


def test_read_prompts_lines_and_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffHi\n\n  Who are you?\n", encoding="utf-8")
    expected = [as_conversation("Hi", None), as_conversation("  Who are you?", None)]
    assert read_prompts(str(tmp_path / "a.txt"), None) == expected
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "Hi"}\n'
        '{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}\n'
        '{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "C"}]}\n'
    )
    first, second, third = read_prompts(str(tmp_path / "a.jsonl"), "Be kind.")
    assert first == as_conversation("Hi", "Be kind.")
    assert second == as_conversation("A", "Be kind."), "the answer that a row has is what is asked for"
    assert third[0] == {"role": "system", "content": "S"}, "a row's own system line counts"


def test_read_prompt_row_of_json() -> None:
    assert read_prompt("line 1", '{"prompt": "Hi"}\n', "Be kind.")[0] == as_conversation("Hi", "Be kind.")
    for text, message in (("Hi\n", "line 1: not valid JSON"), ("[]\n", "line 1: expected a column prompt")):
        with pytest.raises(DataError, match=message):
            read_prompt("line 1", text, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.txt", None, "no such file"),
        ("a.docx", "x", "unsupported file type"),
        ("a.txt", "\n\n", "no prompts in the file"),
        ("a.txt", "Hi\nH\udce9", "a\\.txt: not UTF-8 at byte 5, in line 2"),
        ("a.jsonl", '{"promt": "Hi"}\n', r"a\.jsonl:1: expected a column prompt .* found promt\."),
        ("a.jsonl", '{"prompt": "Hi"}\n{\n', r"a\.jsonl:2: "),
        ("a.jsonl", '{"messages": []}\n', "found messages"),
        ("a.jsonl", '{"prompt": 3}\n', "expected a column prompt with text"),
    ],
)
def test_read_prompts_problem_names_location(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(DataError, match=rf"prompts=.*{message}"):
        read_prompts(str(tmp_path / name), None)
