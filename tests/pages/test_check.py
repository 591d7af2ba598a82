"""Findings of finetune check as a page."""

from typing import Any

import pytest

from app.pages.check_page import SECTIONS, check_page, out_of_memory_problem
from app.pages.page import Bars, Code, Facts, Table, TrainingSamples, as_text
from tests.pages.facts import CLUSTER, DATA, MEMORY, TOO_LARGE
from tests.pages.values import all_of, section, titles

DATA_TEXTS = (
    "/data/chat.jsonl, messages",
    "train: 1,200 rows -> 1,185 samples, 40,000 tokens, 10,000 trained (25%)",
    "train: 3 bad rows skipped: chat.jsonl:7",
    "chat.jsonl:7 and 2 more rows: no role",
    "held.jsonl:2: no answer",
    "640 bins of 64 tokens, 97.66% full, lower bound 638; padded rows: 55.0% full",
    "640 (1 epoch), 1 bin per step, about 62 tokens, 16 trained",
    "the chat template writes the current date",
    "p5 11 p50 30 max 900",
    "chat.jsonl:1, 9 tokens, 4 highlighted",
    "keeps 99.2% of the samples whole",
)
MEMORY_TEXTS = (
    "some/model-8B: LoRA of rank 32, adamw",
    "4,096 tokens, rows of up to 2,048, 4,096 tokens trained",
    "20.0 GB (backward)",
    "frozen weights 15.0 GB",
    "allocator 500 MB",
    "22.1 GB of 25.2 GB on RTX 4090: fits",
    "the context of this GPU was not measured yet",
    "48.0 GFLOP per token (forward 1 : backward 2.0 : recomputed 0.5); upper bound 3.4k tokens/s on RTX 4090",
    "faster recipe=lora: 23.4 GB, upper bound 1.30x (nothing to dequantize) batching.tokens=8192: 9.0 GB, upper",
    "saves 1.9 GB (enough), 31% slower: more arithmetic",
    "saves 10.9 GB (enough), as fast: 4 bits a weight",
    "3.2 s, 3 layers traced, the rest extrapolated",
)

CLUSTER_TEXTS = (
    "2 processes on 2 machines, nccl",
    "torch 2.13.0, nccl 2.28.9",
    "gpu1; H100, 16 cores; 700 TFLOP/s; clock +0.0 s",
    "clock +2.5 s",
    "1 MiB in 0.05 ms: 20.0 GB/s, bus 30.0 GB/s",
    "the clock of process 1 (gpu2) is +2.5 s off",
    "21.2 s",
)
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
    "activations": {
        "rows": 64,
        "tokens": 1098,
        "outlier_share": 0.01,
        "int8_error": 0.02,
        "llm_int8_error": 0.005,
        "layers": [
            {
                "layer": f"layers.{at}.down_proj",
                "outlier_share": 0.02,
                "outlier_columns": at,
                "columns": 512,
                "int8_error": at / 100,
                "llm_int8_error": 0.004,
            }
            for at in range(7)
        ],
    },
}
QUANTIZATION_TEXTS = (
    "1,000 weights in 7 linear layers, 1.0 s",
    "layers.6.up_proj: maximum 11.0 standard deviations, 0.20% beyond 6",
    "inputs 64 samples, 1,098 tokens, 7 linear layers",
    "outliers 1.00% of values beyond 6, in 21 of 3,584 columns",
    "error of the outputs: 2.00% in int8, 0.50% in LLM.int8(), which keeps these columns in 16 bits",
    "worst layers.6.down_proj: 2.00% of values beyond 6, in 6 of 512 columns; error 6.00% in int8, 0.40% in LLM.int8()",
)
CHECKS = {
    "data": (DATA, DATA_TEXTS, "chat.jsonl"),
    "memory": (MEMORY, MEMORY_TEXTS, "some/model-8B: LoRA of rank 32, adamw"),
    "cluster": (CLUSTER, CLUSTER_TEXTS, "2 processes on 2 machines, nccl"),
    "quantization": (QUANTIZATION, QUANTIZATION_TEXTS, "asset:tiny"),
}


@pytest.mark.parametrize("check", CHECKS)
def test_check_page_complete(check: str) -> None:
    facts, texts, name = CHECKS[check]
    page = check_page({check: facts})
    text = " ".join(as_text(*page.sections).replace("#", "").split())
    assert [each for each in texts if each not in text] == []
    assert (page.heading, page.title) == (name, f"Check: {name}")


def test_check_page_of_several_checks() -> None:
    page = check_page({"data": DATA, "memory": MEMORY})
    assert page.badges == [("no problems found", "good"), ("fits RTX 4090", "good")]
    assert page.heading == "chat.jsonl"
    assert titles(page)[0] == "Data"
    assert titles(page)[-1] == "Memory-saving options, cheapest first"
    (samples,) = all_of(TrainingSamples, *page.sections)
    assert samples.marked == "tokens in the loss"
    assert [text for _, pieces in samples.samples for text, trained, _ in pieces if trained] == ["Hello"]


def test_check_page_names_no_fact_as_its_section() -> None:
    """The page has the title, and a terminal, which has none, the label of the section."""
    for part in check_page({check: facts for check, (facts, _, _) in CHECKS.items()}).sections:
        names = [name for block in all_of(Facts, part) for name, _ in block.facts]
        assert part.title.lower() not in names
        assert bool(part.label) == (not names or not names[0])


def test_check_bars_proportional() -> None:
    lengths, parts = (all_of(Bars, *SECTIONS[check](CHECKS[check][0]))[0].bars for check in ("data", "memory"))
    assert [(bar.label, bar.share) for bar in lengths] == [("1-32", 1.0), ("33-64", 485 / 700), (">64", 12 / 700)]
    shares = {bar.label: bar.share for bar in parts}
    assert len(shares) == 10, "no part of 0 bytes"
    assert (shares["frozen weights"], shares["saved activations"]) == (1.0, 2 / 15), "relative to the largest part"
    assert [bar.label for bar in (*lengths, *parts) if bar.beyond] == [">64"]


def test_memory_bars_mark_a_part_above_the_memory() -> None:
    small = {**TOO_LARGE, "memory_bytes": 12_000_000_000}
    (bars,) = all_of(Bars, *SECTIONS["memory"](small))
    assert [bar.label for bar in bars.bars if bar.beyond] == ["frozen weights"]


def test_check_message_weights_shown() -> None:
    pieces = [{"text": "Hi ", "trained": False}, {"text": "Hello", "trained": True, "weight": 0.3}]
    rows = [{"place": "a:1", "tokens": 9, "trained_tokens": 4, "pieces": pieces}]
    facts = {**DATA, "preview": {"marked": "x", "rows": rows}}
    assert "Hi [[Hello]](weight 0.3)" in as_text(section(check_page({"data": facts}), "First samples"))


def test_check_of_an_empty_dataset() -> None:
    nothing = dict.fromkeys(("fill", "padded_fill", "trained_share", "length_percentiles", "eval"))
    empty = {**DATA, **nothing, "samples": 0, "bins": 0, "epochs": 0.0, "advice": [], "sources": [],
             "lengths": {"edges": [1, 2], "samples": [0]}, "preview": {"marked": "", "rows": []}}  # fmt: skip
    page = check_page({"data": empty})
    assert "packing nothing to pack" in as_text(section(page, "Data"))
    assert titles(page) == ["Data"]


def test_check_page_problems_first() -> None:
    page = check_page({"data": {**DATA, "stops": ["chat.jsonl:7: no role"]}, "memory": TOO_LARGE})
    assert page.badges == [("training would fail", "bad"), ("does not fit RTX 4090", "bad")]
    assert page.notes == [("bad", "chat.jsonl:7: no role"), ("bad", "it needs 30.1 GB")]
    together = {"override": "a=1 b=2", "needed_bytes": 9e9}
    knobs = all_of(Code, section(check_page({"memory": {**TOO_LARGE, "together": together}}), "Memory-saving"))
    assert [each.text for each in knobs] == ["training.recompute=true", "recipe=qlora", "a=1 b=2"]
    assert knobs[-1].why == "together: 9.0 GB, fits"


def test_check_page_of_a_ladder_has_its_tables() -> None:
    rungs = [{"name": "one", "claimed": {"seconds": 8.0}, "frozen_weights": 5e6, "needs": 2e9}]
    facts: dict[str, Any] = {"sweep": "mine", "label": "RTX 4090", "source": "a paper", "rungs": rungs, "stops": []}
    page = check_page({"ladder": facts})
    assert page.heading == "mine"
    assert [table.cells for table in all_of(Table, *page.sections)] == [[["one", "5.0 MB", "2.0 GB"]], [["one", "8.0"]]]


def test_out_of_memory_problem_parts_and_remedy() -> None:
    told = out_of_memory_problem(TOO_LARGE)
    assert told.startswith("it needs 30.1 GB of 25.2 GB on RTX 4090: frozen weights 15.0 GB, trained weights")
    assert "margin 757 MB; peak: backward." in told
    assert told.endswith("Set recipe=qlora, which saves 10.9 GB.")
    none = {**TOO_LARGE, "knobs": TOO_LARGE["knobs"][:1]}
    together = {"override": "a=1 b=2", "needed_bytes": 1}
    assert out_of_memory_problem({**none, "together": together}).endswith("Set a=1 b=2.")
    assert out_of_memory_problem({**TOO_LARGE, "together": together}).endswith("Set a=1 b=2."), "it costs less"
    assert out_of_memory_problem(none).endswith("choose a smaller model or a larger GPU.")
