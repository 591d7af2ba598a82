"""The page of app.check: its numbers are those of check.json, and what data says cannot become markup."""

import json
from typing import Any

from app.page.check_page import check_page
from tests.page.reading import Element, chart, read, section
from tests.page.test_html import HOSTILE
from tests.page.test_run_page import notes, tiles

FACTS: dict[str, Any] = {
    "source": "chat.jsonl",
    "format": "messages",
    "max_length": 64,
    "rows": 1200,
    "bad_rows": 3,
    "bad": [{"reason": "no role", "rows": 3, "first": "chat.jsonl:7"}],
    "empty": {"column answer": 4, "messages of user": 1},
    "overlong_rows": 12,
    "overlong_tokens": 3456,
    "dropped": 12,
    "duplicate_rows": 5,
    "samples": 1185,
    "total_tokens": 40_000,
    "trained_tokens": 10_000,
    "trained_share": 0.25,
    "longest": 900,
    "packing": True,
    "bin_tokens": 64,
    "bins": 640,
    "fill": 0.9766,
    "lower_bound_bins": 638,
    "padded_fill": 0.55,
    "steps": 640,
    "epochs": 1.0,
    "units_per_step": 1,
    "unit_name": "bins",
    "processes": 1,
    "tokens_per_step": 62.5,
    "trained_tokens_per_step": 15.6,
    "length_percentiles": {"p5": 11, "p50": 30, "max": 900},
    "lengths": {"edges": [1, 33, 65], "samples": [700, 485]},
    "eval": {"source": "held.jsonl", "rows": 20, "samples": 20, "also_trained_on": 2, "bad": [], "empty": {}},
    "preview": {
        "marked": "to be predicted",
        "rows": [
            {
                "place": "chat.jsonl:1",
                "tokens": 9,
                "trained_tokens": 4,
                "pieces": [{"text": "Hi ", "trained": False}, {"text": "Hello", "trained": True}],
            }
        ],
    },
    "sources": [
        {
            "name": name,
            "source": f"{name}.jsonl",
            "format": "messages",
            "rows": rows,
            "bad_rows": 3,
            "overlong_rows": 12,
            "overlong_tokens": 3456,
            "dropped": 11,
            "duplicate_rows": 1,
            "held_out": 7,
            "samples": 590,
            "weight": weight,
            "drawn": 1475,
            "tokens": 30_000,
            "share": share,
        }
        for name, rows, weight, share in (("chat", 900, 1.0, 0.25), ("code", 300, 2.5, 0.75))
    ],
    "notes": ["the chat template writes a date"],
    "stops": [],
    "advice": [{"set": "dataset.max_length=128", "why": "keeps 99.2% of the samples whole"}],
}


def page_of(**changes: Any) -> Element:
    return read(check_page({"data": {**FACTS, **changes}}))


def test_its_numbers_are_those_of_the_file() -> None:
    page = page_of()
    assert page.one("h1").text == "chat.jsonl"
    assert page.all("span", "badge")[0].text == "nothing stops a run"
    assert tiles(page) == {
        "rows": "1,200",
        "bad rows": "3",
        "tokens": "40,000",
        "of them trained": "25.0%",
        "steps": "640",
        "bins full": "97.66%",
    }
    assert notes(page) == ["the chat template writes a date"]
    assert section(page, "Advice").one("pre").text == "dataset.max_length=128"
    told = {
        row.all("td")[0].text: [cell.text for cell in row.all("td")[1:]]
        for row in section(page, "Rows").all("tr")
        if row.all("td")
    }
    assert told["tokens lost by them"] == ["3,456", ""]
    assert told["also trained on"] == ["", "2"]
    assert told["trained tokens"] == ["10,000 (25.0%)", ""]
    assert [cell.text for cell in section(page, "Bad rows").all("td")] == ["chat.jsonl:7", "3", "no role"]
    assert "638; the plan has 2 more" in section(page, "Packing").text
    assert "1 bin each" in section(page, "Packing").text
    assert [mark.text for mark in section(page, "First samples").all("mark")] == [
        "marked: to be predicted",
        "Hello",
    ]


def test_weights_are_told_and_shown_with_what_they_are_of() -> None:
    pieces = [{"text": "Hello", "trained": True, "weight": 0.3}]
    rows = [{"place": "a:1", "tokens": 9, "trained_tokens": 4, "pieces": pieces}]
    weights = {"samples": 7, "trained_tokens_count_as": 4000.5, "share": 0.1}
    page = page_of(weights=weights, preview={"marked": "x", "rows": rows})
    assert "10,000 (25.0%), weighted 4,000.5 (10.0%)" in section(page, "Rows").text
    assert "Hello (weight 0.3)" in section(page, "First samples").text


def test_over_long_samples_have_a_bar_of_their_own() -> None:
    figure = chart(page_of(), "Samples by their length")
    bars = figure.all("rect")
    assert [bar.one("title").text for bar in bars] == [
        "1 to 32 tokens: 700 samples",
        "33 to 64 tokens: 485 samples",
        "over-long: 12 samples",
    ]
    assert [bar.attributes["class"] for bar in bars] == ["bar", "bar", "bar over"]
    assert len(chart(page_of(dropped=0), "Samples by their length").all("rect")) == 2


def test_what_would_stop_a_run_comes_first() -> None:
    page = page_of(stops=["chat.jsonl:7: no role", "too long"], notes=[])
    assert page.all("span", "badge")[0].text == "a run would stop"
    assert notes(page) == ["chat.jsonl:7: no role", "too long"]


def test_rows_held_out_of_the_training_rows_were_not_read_again() -> None:
    page = page_of(eval={"source": "chat.jsonl", "rows": 0, "bad_rows": 0, "samples": 9, "bad": []})
    rows = [[cell.text for cell in row.all("td")] for row in section(page, "Rows").all("tr") if row.all("td")]
    assert ["rows read", "1,200", ""] in rows
    assert ["samples", "1,185", "9"] in rows


def test_of_nothing_there_is_a_page_too() -> None:
    nothing = dict.fromkeys(("fill", "padded_fill", "trained_share", "length_percentiles", "eval"))
    page = page_of(**nothing, samples=0, bins=0, lower_bound_bins=0, epochs=0.0, dropped=0, advice=[],
                   lengths={"edges": [1, 2], "samples": [0]}, preview={"marked": "", "rows": []})  # fmt: skip
    assert "bins full" not in tiles(page)
    assert "nothing stands out" in section(page, "Advice").text


def test_what_the_data_says_stays_text() -> None:
    spoilt = json.loads(json.dumps(FACTS).replace('"Hi "', json.dumps(HOSTILE)))
    spoilt.update(source=HOSTILE, stops=[HOSTILE], notes=[HOSTILE], advice=[{"set": HOSTILE, "why": HOSTILE}])
    spoilt["bad"] = [{"reason": HOSTILE, "rows": 1, "first": HOSTILE}]
    page = read(check_page({"data": spoilt}))
    assert not {"script", "img", "iframe"} & {each.tag for each in page.all("body")[0].children}
    assert page.all("script") == page.all("img") == []


def test_the_sources_of_a_mix_stand_side_by_side() -> None:
    head, chat, code = section(page_of(), "Sources").all("tr")
    told = [[cell.text for cell in row.all("td")] for row in (chat, code)]
    assert dict(zip([cell.text for cell in head.all("th")], told[1], strict=True)) == {
        "source": "code",
        "format": "messages",
        "rows": "300",
        "bad": "3",
        "over-long": "12",
        "dropped": "11",
        "duplicates": "1",
        "held out": "7",
        "weight": "2.5",
        "samples an epoch": "1,475",
        "tokens an epoch": "30,000",
        "share": "75.0%",
    }
    assert told[0][-1] == "25.0%"
    assert not [each for each in page_of(sources=[]).all("h2") if each.text == "Sources"]


def test_texts_without_words_are_told() -> None:
    rows = [[cell.text for cell in row.all("td")] for row in section(page_of(), "Empty texts").all("tr")[1:]]
    assert rows == [["column answer", "4"], ["messages of user", "1"]]
    assert not [each for each in page_of(empty={}).all("h2") if each.text == "Empty texts"]
