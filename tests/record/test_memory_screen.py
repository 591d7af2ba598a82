"""What app.check memory shows: nothing is lost on narrow terminals or without colours."""

from typing import Any

import pytest

from app.record.memory_screen import show_memory, stop
from tests.page.memory_facts import MEMORY, TOO_LARGE
from tests.record.test_survey_screen import ESCAPE, Screen, words

SAID = (
    "some/model-8B: LoRA of rank 32, adamw",
    "4,096 tokens, rows of up to 2,048, 4,096 tokens predicted",
    "20.0 GB, backward",
    "frozen weights 15.0 GB",
    "allocator 500 MB",
    "margin 757 MB",
    "22.1 GB of the 25.2 GB of RTX 4090, fits",
    "the context of this GPU was not measured yet",
    "48.0 GFLOP a token; at most 3.4k tokens/s on RTX 4090, a bound that no run reaches",
    "training.recompute=true saves 1.9 GB (enough), 31% slower: more arithmetic",
    "recipe=qlora saves 10.9 GB (enough), as fast: 4 bits a weight",
    "3.2 s, 3 layers traced, the others like them",
)


def shown(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], columns: int = 100, **given: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **given}.items():
        monkeypatch.setenv(name, value)
    stream = Screen()
    show_memory(facts, stream)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [120, 59])
def test_everything_is_said_on_wide_and_narrow_terminals(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    text = shown(monkeypatch, MEMORY, columns)
    said = " ".join(words(text).replace("█", "").split())
    for each in SAID:
        assert each in said, each
    assert max(len(ESCAPE.sub("", line).rstrip()) for line in text.splitlines()) <= columns


def test_bars_are_as_long_as_what_they_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ESCAPE.sub("", shown(monkeypatch, MEMORY)).splitlines()
    lengths = {line.strip().split("  ")[0]: line.count("█") for line in lines if "█" in line}
    assert len(lengths) == 10  # no part of 0 bytes
    assert lengths["frozen weights"] == round(32 * 15 / 25.233)
    assert min(lengths.values()) == 1


def test_without_colours_nothing_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[3" not in shown(monkeypatch, MEMORY, NO_COLOR="1")


def test_what_does_not_fit_is_told_with_its_parts_and_the_cheapest_way_in() -> None:
    told = stop(TOO_LARGE)
    assert told.startswith(
        "it needs 30.1 GB of the 25.2 GB of RTX 4090: frozen weights 15.0 GB, trained weights 300"
    )
    assert "margin 757 MB; the peak is in: backward." in told
    assert told.endswith("Set recipe=qlora, which saves 10.9 GB.")
    none = {**TOO_LARGE, "knobs": TOO_LARGE["knobs"][:1]}
    together = {"override": "a=1 b=2", "needed_bytes": 1}
    assert stop({**none, "together": together}).endswith("Set a=1 b=2.")
    assert stop({**TOO_LARGE, "together": together}).endswith("Set a=1 b=2."), "it costs less"
    assert stop(none).endswith("choose a smaller model or more memory.")
