"""The card of a model: code that works, nothing of a run read as Markdown or as code, no secret, no folder."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from app.pages.model_card import Loading, model_card

RUN: dict[str, Any] = {
    "model": {"path": "org/name", "weights": "pretrained", "licence_page": "https://example.org/my_terms"},
    "task": {"kind": "causal"},
    "adapter": {"kind": "lora", "r": 24, "alpha": 16.0, "targets": ["all-linear"]},
    "quantization": {"kind": "none", "double_quant": False},
    "seed": 3,
}
COMMAND = ["/env/bin/python", "-m", "app.train", "recipe=lora", "output_dir=/home/me/runs/mine"]
COMMAND += ["dataset.path=/data/a b/chat.jsonl", "tracker.name=it's", "model=org/name"]
MANIFEST: dict[str, Any] = {
    "counts": {"data": {"train": {"source": "/home/me/chat.jsonl + org/set", "samples": 1234}, "eval": None}},
    "packages": {"torch": "2.13.0", "numpy": "2"},
    "hardware": {"gpu": None, "cpu": "AVX512"},
    "cpus": 2,
    "starts": [{"command_line": COMMAND}, {"command_line": []}],
}
ADAPTER = Loading(auto_class="AutoModelForCausalLM", adapter={"peft_type": "LORA", "r": 24}, dtype="bfloat16")
WHOLE = Loading(auto_class="AutoModelForMaskedLM", dtype="bfloat16", needs_transformers_5=True)


def card(loading: Loading = ADAPTER, run: dict[str, Any] | None = None, **result: Any) -> str:
    return model_card(RUN | (run or {}), MANIFEST, result, loading)


def front(text: str) -> dict[str, Any]:
    values: dict[str, Any] = ModelCard(text).data.to_dict()
    return values


def code_of(text: str) -> str:
    return text.partition("```python\n")[2].partition("\n```")[0]


def test_model_card_of_other_method_has_its_settings_and_no_rank() -> None:
    text = card(run={"adapter": {"kind": "peft", "method": "OFT", "fields": {"block": 16}, "r": 0, "alpha": 0.0}})
    assert "# OFT adapter" in text
    assert "| adapter.method | OFT |" in text
    assert "| adapter.fields | {'block': 16} |" in text
    assert "adapter.r " not in text


def test_model_card_of_adapter_has_what_others_need() -> None:
    final = {"eval_loss": 2.0, "eval_loss_margin": 0.25, "exact_match": 0.5}
    text = card(steps=10, train_loss_last=9.0, train_loss=1.5, final_metrics=final, start_metrics={"eval_loss": 9.5})
    assert front(text) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": "org/name",
        "base_model_relation": "adapter",
        "license": "other",
        "license_name": "base-model-license",
        "license_link": "https://example.org/my_terms",
    }
    for line in (
        "# LoRA adapter, fine-tuned from org/name",
        "The license of the base model applies: <https://example.org/my_terms>",
        "vllm serve org/name --enable-lora --max-lora-rank 32 --lora-modules tuned=.",
        "finetune train recipe=lora output_dir=mine dataset.path=chat.jsonl 'tracker.name=",
        "| adapter.r | 24 |",
        "| quantization.kind | none |",
        "| source | chat.jsonl + org/set |  |",
        "| samples | 1,234 |  |",
        "| train_loss | 1.5 |  |  |",
        "train_loss is the mean of the last logged training losses (a tenth, 10 to 100, at most half).",
        "| eval_loss | 2 | ± 0.25 | 9.5 |",
        "| exact_match | 0.5 |  |  |",
        "| device | AVX512 CPU, 2 cores |",
        "| packages | torch 2.13.0 |",
    ):
        assert line in text
    assert "double" not in text
    assert "/home" not in text


def test_model_card_of_whole_model_says_what_it_needs() -> None:
    text = card(WHOLE)
    assert front(text)["library_name"] == "transformers"
    assert front(text)["pipeline_tag"] == "fill-mask"
    assert "PeftModel" not in text
    assert "vllm" not in text
    assert "Requires transformers 5" in text
    assert "vllm serve .\n" in card(Loading(auto_class="AutoModelForCausalLM", dtype="bfloat16"))


@pytest.mark.parametrize(
    ("path", "name"), [('/models/a"b\\', 'a"b\\'), ("~/it's", "it's"), ("./x\n```\nimport os", "x\n```\nimport os")]
)
def test_model_card_code_names_local_base_without_its_folder(path: str, name: str) -> None:
    text = card(run={"model": {"path": path, "weights": "pretrained"}})
    code = code_of(text)
    compile(code, "card", "exec")
    (line,) = (line for line in code.splitlines() if line.startswith("base_folder = "))
    assert eval(line.removeprefix("base_folder = ")) == name
    assert "base_model" not in front(text)
    assert "vllm serve BASE_FOLDER" in text


def test_model_card_does_not_take_a_folder_here_for_one_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    text = card(run={**RUN, "model": {**RUN["model"], "path": "models/mine"}})
    assert "base_model" not in front(text)
    assert 'base_folder = "mine"' in code_of(text)


def test_model_card_escapes_markdown() -> None:
    model = {"path": "a|b <img src=x> [c](d) `e`\n# f", "weights": "pretrained"}
    text = card(run={"model": model})
    assert "a\\|b &lt;img src=x&gt; \\[c\\](d) \\`e\\` \\# f" in text
    assert "<img" not in text.replace(code_of(text), "")


def test_model_card_redacts_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    model = {"path": "https://u:very-secret-value@host/x", "weights": "pretrained"}
    assert "very-secret-value" not in card(run={"model": model})


def test_model_card_has_no_control_characters() -> None:
    assert not set(card(run={"model": {"path": "a\x1b[2J\u202e", "weights": "pretrained"}})) & {"\x1b", "\u202e"}
