"""The table that ends a run."""

import json
from pathlib import Path

from app.record.before_after import before_after


def samples(folder: Path, *lines: tuple[int, str, str, str]) -> Path:
    file = folder / "samples.jsonl"
    keys = ("step", "prompt", "expected", "answer")
    file.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    return file


def test_the_first_and_the_last_answers_stand_beside_each_other(tmp_path: Path) -> None:
    file = samples(
        tmp_path,
        (0, "2+2?", "4", "the\nmoon"),
        (0, "x" * 50 + " and why?", "so", "y" * 40),
        (5, "2+2?", "4", "5"),
        (5, "x" * 50 + " and why?", "so", "because"),
        (9, "2+2?", "4", "4"),
        (9, "x" * 50 + " and why?", "so", "so"),
    )
    assert before_after(file) == (
        f"{'held out':<40}  expected  before{' ' * 22}  after step 9\n"
        f"{'2+2?':<40}  4         the moon{' ' * 20}  4\n"
        f"…{'x' * 30} and why?  so        {'y' * 27}…  so"
    )


def test_a_run_without_both_ends_has_no_table(tmp_path: Path) -> None:
    assert before_after(tmp_path / "none.jsonl") is None
    assert before_after(samples(tmp_path, (0, "a", "b", "c"))) is None
    assert before_after(samples(tmp_path, (4, "a", "b", "c"), (9, "a", "b", "b"))) is None


def test_another_prompt_is_not_compared(tmp_path: Path) -> None:
    """A line in between was torn: what follows belongs to other rows."""
    assert before_after(samples(tmp_path, (0, "a", "1", "2"), (0, "b", "3", "4"), (7, "b", "3", "3"))) is None
