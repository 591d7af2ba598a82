"""What app.check shows: nothing is lost on narrow terminals or without colours."""

import io
import re
from typing import Any

import pytest

from app.record.survey_screen import show_survey
from tests.page.test_check_page import FACTS as PAGE_FACTS

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
FACTS: dict[str, Any] = {
    **PAGE_FACTS,
    "eval": {
        **PAGE_FACTS,
        "rows": 20,
        "samples": 20,
        "duplicate_rows": 0,
        "also_trained_on": 2,
        "bad": [],
        "empty": {},
    },
}


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    def show(columns: int = 100, **environment: str) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        stream = Screen()
        show_survey(FACTS, stream)
        return stream.getvalue()

    return show


def words(text: str) -> str:
    return " ".join(ESCAPE.sub("", text).split())


SAID = (
    "chat.jsonl, messages",
    "1,200: 3 bad, 12 over-long (3,456 tokens lost), 5 duplicates; 1,185 samples",
    "40,000, 10,000 trained (25.0%)",
    "chat.jsonl:7 and 2 more rows: no role",
    "empty 4 in column answer, 1 in messages of user",
    "chat: 900 rows: 3 bad, 12 over-long (11 dropped, 3,456 tokens lost), 1 duplicate; 590 samples, 7 held out",
    "weight 2.5: 1,475 samples and 30,000 tokens an epoch, 75.0% of its tokens",
    "640 bins of 64 tokens, 97.66% full (2 more than the provable least); padded rows 55.0% full otherwise",
    "640 (1 epoch) of 1 bin, about 62 tokens, 16 trained",
    "2 also trained on",
    "p5 11 p50 30 max 900",
    "dataset.max_length=128 keeps 99.2% of the samples whole",
)


@pytest.mark.parametrize("columns", [120, 59])
def test_everything_is_said_on_wide_and_narrow_terminals(shown: Any, columns: int) -> None:
    text = shown(columns)
    for each in SAID:
        assert each in words(text), each
    assert max(len(ESCAPE.sub("", line).rstrip()) for line in text.splitlines()) <= columns


def test_on_a_phone_wide_terminal_words_are_folded_not_lost(shown: Any) -> None:
    text = shown(24)
    assert max(len(ESCAPE.sub("", line).rstrip()) for line in text.splitlines()) <= 24
    assert "keeps99.2%ofthesampleswhole" in re.sub(r"\s", "", ESCAPE.sub("", text))


def test_trained_tokens_are_marked_in_colour(shown: Any) -> None:
    [marked] = re.findall(r"\x1b\[30;42m(Hello)\x1b\[0m", shown())
    assert marked == "Hello"
    assert "[[" not in shown()


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours_they_are_in_brackets(shown: Any, environment: dict[str, str]) -> None:
    text = shown(**environment)
    assert "Hi [[Hello]]" in ESCAPE.sub("", text)
    assert not re.search(r"\x1b\[[0-9;]*(3|4)[0-9]", text)


def test_weights_are_told_and_stand_behind_what_they_are_of() -> None:
    stream = io.StringIO()
    pieces = [{"text": "Hi ", "trained": False}, {"text": "Hello", "trained": True, "weight": 0.3}]
    rows = [{"place": "a:1", "tokens": 9, "trained_tokens": 4, "pieces": pieces}]
    weights = {"samples": 1, "trained_tokens_count_as": 1.2, "share": 0.3}
    show_survey({**FACTS, "weights": weights, "preview": {"marked": "x", "rows": rows}}, stream)
    assert "Hi [[Hello]](weight 0.3)" in stream.getvalue()
    words = " ".join(stream.getvalue().split())
    assert "trained (25.0%), which count as 1.2 (30.0%) by the weights in 1 sample" in words


def test_bars_are_as_long_as_their_counts(shown: Any) -> None:
    lines = ESCAPE.sub("", shown()).splitlines()
    lengths = {line.split()[0]: line.count("█") for line in lines if "█" in line}
    assert lengths == {"1-32": 32, "33-64": 22, ">64": 1}


def test_what_the_data_says_cannot_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    evil = "\x1b[2J\x1b[1;1H[bold]evil[/bold]"
    rows = [{"place": evil, "tokens": 1, "trained_tokens": 1, "pieces": [{"text": evil, "trained": True}]}]
    advice = [{"set": evil, "why": evil}]
    bad = [{"reason": evil, "rows": 1, "first": evil}]
    spoilt = {"source": evil, "bad": bad, "preview": {"marked": "x", "rows": rows}, "advice": advice}
    show_survey({**FACTS, **spoilt}, stream)
    assert "\x1b" not in stream.getvalue()
    assert "[bold]evil[/bold]" in stream.getvalue()
