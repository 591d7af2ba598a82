"""The card of a model: code that works, nothing of a run read as Markdown or as code, no secret."""

from typing import Any

import pytest
import yaml

from app.tracking.model_card import Loading, model_card

RUN: dict[str, Any] = {
    "model": {"path": "org/name", "weights": "pretrained", "licence_page": "https://example.org/my_terms"},
    "task": {"kind": "causal"},
    "adapter": {"kind": "lora", "r": 8, "alpha": 16.0, "targets": ["all-linear"]},
    "quantization": {"kind": "none", "double_quant": False},
    "seed": 3,
}
MANIFEST: dict[str, Any] = {
    "counts": {"data": {"train": {"source": "chat.jsonl", "samples": 1234}, "eval": None}},
    "packages": {"torch": "2.13.0", "numpy": "2"},
    "hardware": {"gpu": None, "cpu": "AVX512"},
    "cpus": 2,
}
ADAPTER = Loading("AutoModelForCausalLM", "org/name", base_inside=False, dtype="bfloat16")
WHOLE = Loading("AutoModelForMaskedLM", None, base_inside=False, dtype="bfloat16")


def card(loading: Loading = ADAPTER, run: dict[str, Any] | None = None, **result: Any) -> str:
    return model_card(RUN | (run or {}), MANIFEST, result, loading)


def front(text: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(text.split("---")[1])
    return values


def test_model_card_content() -> None:
    text = card(steps=10, eval_loss=2.0)
    assert front(text) == {
        "library_name": "peft", "pipeline_tag": "text-generation", "base_model": "org/name",
    }  # fmt: skip
    for line in (
        "# LoRA adapter, tuned from org/name",
        "licence: <https://example.org/my_terms>",
        "| adapter.r | 8 |",
        "| quantization.kind | none |",
        "| samples | 1,234 |  |",
        "| perplexity | 7.38906 |",
        "| device | AVX512 CPU, 2 cores |",
        "| packages | torch 2.13.0 |",
    ):
        assert line in text
    assert "double" not in text
    assert front(card(WHOLE)) == {
        "library_name": "transformers", "pipeline_tag": "fill-mask", "base_model": "org/name",
    }  # fmt: skip


@pytest.mark.parametrize("path", ['a"b/c\\', "/models/it's", "x\n```\nimport os"])
def test_model_card_code_quotes_base(path: str) -> None:
    loading = Loading("AutoModelForCausalLM", path, base_inside=False, dtype="float32")
    code = card(loading).partition("```python\n")[2].partition("\n```")[0]
    compile(code, "card", "exec")
    (line,) = (line for line in code.splitlines() if line.startswith("base = "))
    assert eval(line.partition("from_pretrained(")[2].rpartition(", dtype")[0]) == path


def test_model_card_escapes_markdown() -> None:
    model = {"path": "a|b <img src=x> [c](d) `e`\n# f", "weights": "pretrained"}
    text = card(run={"model": model})
    assert "a\\|b &lt;img src=x&gt; \\[c\\](d) \\`e\\` \\# f" in text
    assert "<img" not in text


def test_model_card_redacts_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    model = {"path": "https://u:very-secret-value@host/x", "weights": "pretrained"}
    assert "very-secret-value" not in card(run={"model": model})
