"""Findings of app.check: page and terminal show the same, and hostile data is harmless."""

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from app.pages.check_report import check_page, show_check
from app.pages.check_summary import (
    Section,
    cluster_sections,
    data_sections,
    memory_sections,
    out_of_memory_problem,
    quantization_sections,
)
from tests.pages.facts import CLUSTER, DATA, MEMORY, TOO_LARGE
from tests.pages.reading import Element, notes, read, section
from tests.pages.test_render import HOSTILE

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
Shown = Callable[..., str]
DATA_TEXTS = (
    "/data/chat.jsonl, messages",
    "train: 1,200 rows -> 1,185 samples, 40,000 tokens, 10,000 trained (25%)",
    "train: 3 bad rows skipped: chat.jsonl:7",
    "chat.jsonl:7 and 2 more rows: no role",
    "held.jsonl:2: no answer",
    "640 bins of 64 tokens, 97.66% full, at least 638 needed; padded rows would be 55.0% full",
    "640 (1 epoch) of 1 bin, about 62 tokens, 16 trained",
    "the chat template writes a date",
    "p5 11 p50 30 max 900",
    "chat.jsonl:1, 9 tokens, 4 of them marked",
    "keeps 99.2% of the samples whole",
)
MEMORY_TEXTS = (
    "some/model-8B: LoRA of rank 32, adamw",
    "4,096 tokens, rows of up to 2,048, 4,096 tokens trained",
    "20.0 GB, backward",
    "frozen weights 15.0 GB",
    "allocator 500 MB",
    "22.1 GB of the 25.2 GB of RTX 4090, fits",
    "the context of this GPU was not measured yet",
    "48.0 GFLOP a token; at most 3.4k tokens/s on RTX 4090, a bound that no run reaches",
    "saves 1.9 GB (enough), 31% slower: more arithmetic",
    "saves 10.9 GB (enough), as fast: 4 bits a weight",
    "3.2 s, 3 layers traced, the others like them",
)

CLUSTER_TEXTS = (
    "2 processes on 2 machines, nccl",
    "torch 2.13.0, nccl 2.28.9",
    "gpu1; H100, 16 cores; 700 TFLOP/s; clock +0.0 s",
    "clock +2.5 s",
    "1 MiB in 0.05 ms: 20.0 GB/s, on the bus 30.0 GB/s",
    "the clock of process 1 (gpu2) is +2.5 s off",
    "21.2 s",
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    def show(sections: list[Section], columns: int = 100, **environment: str) -> str:
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": str(columns), **environment}.items():
            monkeypatch.setenv(name, value)
        stream = Screen()
        show_check(sections, stream)
        return stream.getvalue()

    return show


def words(text: str) -> str:
    return " ".join(ESCAPE.sub("", text).replace("█", "").split())


QUANTIZATION = {
    "model": "asset:tiny",
    "weights": 1000,
    "seconds": 1.0,
    "stops": [],
    "formats": [{"format": "NF4, for 64 weights", "error": 0.093, "bits_per_weight": 4.5}],
    "layers": [
        {"layer": f"layers.{at}.up_proj", "weights": 100, "outlier_share": 0.002, "largest_in_stds": at + 5.0}
        for at in range(7)
    ],
}
QUANTIZATION_TEXTS = (
    "1,000 weights in 7 linear layers, 1.0 s",
    "layers.6.up_proj: the largest is 11.0 standard deviations, 0.20% are beyond 6",
)


@pytest.mark.parametrize("columns", [120, 70])
@pytest.mark.parametrize("check", ["data", "memory", "cluster", "quantization"])
def test_show_check_complete_at_any_width(shown: Shown, check: str, columns: int) -> None:
    sections, texts = {
        "data": (data_sections(DATA), DATA_TEXTS),
        "memory": (memory_sections(MEMORY), MEMORY_TEXTS),
        "cluster": (cluster_sections(CLUSTER), CLUSTER_TEXTS),
        "quantization": (quantization_sections(QUANTIZATION), QUANTIZATION_TEXTS),
    }[check]
    text = shown(sections, columns)
    for each in texts:
        assert each in words(text), each
    assert max(len(ESCAPE.sub("", line).rstrip()) for line in text.splitlines()) <= columns


def test_check_page_complete() -> None:
    page = read(check_page({"data": DATA, "memory": MEMORY, "cluster": CLUSTER, "quantization": QUANTIZATION}))
    text = " ".join(page.one("main").text.replace("\n", " ").split())
    for each in (
        *DATA_TEXTS,
        *MEMORY_TEXTS,
        *CLUSTER_TEXTS,
        *QUANTIZATION_TEXTS,
        "dataset.max_length=128",
        "training.recompute=true",
    ):
        assert each.removeprefix("frozen weights ").removeprefix("allocator ") in text, each
    assert page.one("h1").text == "chat.jsonl"
    assert [each.text for each in page.all("span", "badge")] == ["nothing stops a run", "fits RTX 4090"]
    assert [mark.text for mark in page.all("mark")] == ["marked: to be predicted", "Hello"]


def test_show_check_trained_tokens_marked(shown: Shown) -> None:
    text = shown(data_sections(DATA))
    assert re.findall(r"\x1b\[30;42m(Hello)\x1b\[0m", text) == ["Hello"]
    assert "[[" not in text
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        plain = shown(data_sections(DATA), **environment)
        assert "Hi [[Hello]]" in ESCAPE.sub("", plain)
        assert not re.search(r"\x1b\[[0-9;]*(3|4)[0-9]", plain)


def test_check_bars_proportional(shown: Shown) -> None:
    lines = ESCAPE.sub("", shown(data_sections(DATA))).splitlines()
    assert {line.split()[0]: line.count("█") for line in lines if "█" in line} == {"1-32": 32, "33-64": 22, ">64": 1}
    lines = ESCAPE.sub("", shown(memory_sections(MEMORY))).splitlines()
    lengths = {line.strip().split("  ")[0]: line.count("█") for line in lines if "█" in line}
    assert (len(lengths), lengths["frozen weights"]) == (10, round(32 * 15 / 25.233)), "no part of 0 bytes"
    page = read(check_page({"memory": MEMORY}))
    assert page.all("rect", "bar")[0].attributes["width"] == "59.45%"
    assert len(page.all("rect", "beyond")) == 3


def test_show_check_in_a_pipe_has_plain_lines() -> None:
    stream = io.StringIO()
    show_check([*data_sections(DATA), *memory_sections(MEMORY)], stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    for each in (*DATA_TEXTS, *MEMORY_TEXTS):
        assert each in words(text), each


def test_check_message_weights_shown(shown: Shown) -> None:
    pieces = [{"text": "Hi ", "trained": False}, {"text": "Hello", "trained": True, "weight": 0.3}]
    rows = [{"place": "a:1", "tokens": 9, "trained_tokens": 4, "pieces": pieces}]
    facts = {**DATA, "preview": {"marked": "x", "rows": rows}}
    text = words(shown(data_sections(facts), NO_COLOR="1"))
    assert "Hi [[Hello]](weight 0.3)" in text
    assert "Hello(weight 0.3)" in section(read(check_page({"data": facts})), "First samples").text


def test_check_of_an_empty_dataset(shown: Shown) -> None:
    nothing = dict.fromkeys(("fill", "padded_fill", "trained_share", "length_percentiles", "eval"))
    empty = {**DATA, **nothing, "samples": 0, "bins": 0, "epochs": 0.0, "advice": [], "sources": [],
             "lengths": {"edges": [1, 2], "samples": [0]}, "preview": {"marked": "", "rows": []}}  # fmt: skip
    text = words(shown(data_sections(empty)))
    for each in ("packing nothing to pack", "advice none"):
        assert each in text
    assert "nothing to pack" in read(check_page({"data": empty})).text


def test_check_page_problems_first() -> None:
    page = read(check_page({"data": {**DATA, "stops": ["chat.jsonl:7: no role"]}, "memory": TOO_LARGE}))
    assert [each.text for each in page.all("span", "badge")] == ["a run would stop", "does not fit RTX 4090"]
    assert notes(page) == ["chat.jsonl:7: no role", "it needs 30.1 GB"]
    together = {"override": "a=1 b=2", "needed_bytes": 9e9}
    shown = section(read(check_page({"memory": {**TOO_LARGE, "together": together}})), "What brings")
    assert [each.text for each in shown.all("pre")] == ["training.recompute=true", "recipe=qlora", "a=1 b=2"]
    assert "together: 9.0 GB, which fits" in shown.text


def test_out_of_memory_problem_parts_and_remedy() -> None:
    told = out_of_memory_problem(TOO_LARGE)
    assert told.startswith("it needs 30.1 GB of the 25.2 GB of RTX 4090: frozen weights 15.0 GB, trained weights")
    assert "margin 757 MB; the peak is in: backward." in told
    assert told.endswith("Set recipe=qlora, which saves 10.9 GB.")
    none = {**TOO_LARGE, "knobs": TOO_LARGE["knobs"][:1]}
    together = {"override": "a=1 b=2", "needed_bytes": 1}
    assert out_of_memory_problem({**none, "together": together}).endswith("Set a=1 b=2.")
    assert out_of_memory_problem({**TOO_LARGE, "together": together}).endswith("Set a=1 b=2."), "it costs less"
    assert out_of_memory_problem(none).endswith("choose a smaller model or more memory.")


@pytest.mark.parametrize("facts", [DATA, MEMORY], ids=["data", "memory"])
def test_check_hostile_text_escaped(shown: Shown, facts: dict[str, Any]) -> None:
    words = ("chat.jsonl", "the chat template writes a date", "no role", "Hi ", "keeps 99.2% of the samples whole",
             "some/model-8B: LoRA of rank 32, adamw", "more arithmetic", "recipe=qlora", "RTX 4090")  # fmt: skip
    text = json.dumps(facts)
    for each in words:
        text = text.replace(json.dumps(each), json.dumps(HOSTILE))
    spoilt = json.loads(text)
    page: Element = read(check_page({"data" if facts is DATA else "memory": spoilt}))
    assert page.all("script") == page.all("img") == []
    assert page.text.count("onerror") >= 4
    screen = shown(data_sections(spoilt) if facts is DATA else memory_sections(spoilt), TERM="dumb")
    assert "\x1b" not in screen
    assert "onerror" in screen
