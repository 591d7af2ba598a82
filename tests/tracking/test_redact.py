from typing import Any

import pytest

from app.tracking.redact import MASK, redact, redact_text

HUB = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "correct-horse")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("LONGER_SECRET", "correct-horse-battery")
    monkeypatch.setenv("TINY_KEY", "abc")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("login with correct-horse failed", f"login with {MASK} failed"),
        ("0123456789abcdef and correct-horse-battery", f"{MASK} and {MASK}"),
        (f"token {HUB}!", f"token {MASK}!"),
        ("git clone https://user:pw@host/x", f"git clone https://{MASK}@host/x"),
        ("abc is too short to be looked for", "abc is too short to be looked for"),
        ("loss=1.5 tokens=300 https://host/a@b", "loss=1.5 tokens=300 https://host/a@b"),
    ],
)
def test_redact_text_secrets(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("+hub_token=geheim", f"+hub_token={MASK}"),
        ("model.api-key=geheim", f"model.api-key={MASK}"),
        ("--token=geheim", f"--token={MASK}"),
        ("key=geheim", f"key={MASK}"),
        ("model.path=https://me:geheim@host/m", f"model.path=https://{MASK}@host/m"),
        ("batching.tokens=4096", "batching.tokens=4096"),
        ("model.tokenizer=here", "model.tokenizer=here"),
        ("monkey=see", "monkey=see"),
        ({"wandb_api_key": "geheim", "lr": 0.1}, {"wandb_api_key": MASK, "lr": 0.1}),
        ({"a": [{"password": "geheim"}, ("x", "correct-horse")]}, {"a": [{"password": MASK}, ["x", MASK]]}),
        ({"hub_token": None, "aws_secret": ""}, {"hub_token": None, "aws_secret": ""}),
        ({"eos_token": "</s>", "pad_token": "<pad>"}, {"eos_token": "</s>", "pad_token": "<pad>"}),
        ({"cache_key": "3f2a", "max_tokens": 5}, {"cache_key": "3f2a", "max_tokens": 5}),
    ],
)
def test_redact_structure(value: Any, expected: Any) -> None:
    assert redact(value) == expected
