from typing import Any

import pytest

from app.errors import ConfigError
from app.safe_text import MASK, printable, redact, redact_text

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
        (
            "https://host/a?b=1&token=ge%20heim&X-Amz-Signature=0f#c",
            f"https://host/a?b=1&token={MASK}&X-Amz-Signature={MASK}#c",
        ),
        (
            "https://host/a?X-Amz-Security-Token=x&api_key='y'",
            f"https://host/a?X-Amz-Security-Token={MASK}&api_key='y'",
        ),
        ("https://host/a?max_tokens=5&monkey=see", "https://host/a?max_tokens=5&monkey=see"),
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
        (
            {"GITHUB_PAT": "a", "PGPASS": "b", "SSH_PASSPHRASE": "c"},
            dict.fromkeys(("GITHUB_PAT", "PGPASS", "SSH_PASSPHRASE"), MASK),
        ),
        (
            {"HF_TOKEN_2": "a", "PATH": "b", "compass": "c", "PWD": "d"},
            {"HF_TOKEN_2": MASK, "PATH": "b", "compass": "c", "PWD": "d"},
        ),
        ({"hub_token": None, "aws_secret": ""}, {"hub_token": None, "aws_secret": ""}),
        ({"eos_token": "</s>", "pad_token": "<pad>"}, {"eos_token": "</s>", "pad_token": "<pad>"}),
        ({"cache_key": "3f2a", "max_tokens": 5}, {"cache_key": "3f2a", "max_tokens": 5}),
    ],
)
def test_redact_structure(value: Any, expected: Any) -> None:
    assert redact(value) == expected


def test_printable_replaces_control_characters() -> None:
    assert printable("é日本👩‍💻\u00a0\t\n") == "é日本👩‍💻\u00a0\t\n"
    assert printable("a\x1b]0;title\x07\r\x9b\u202e\u2066") == "a\ufffd]0;title" + "\ufffd" * 5


def test_message_has_neither_secrets_nor_control_characters() -> None:
    for problems in (["a\x1b[2J\u202e: https://me:geheim@host/x"], ["a\x1b", "correct-horse https://me:geheim@host"]):
        report = ConfigError(problems).report()
        assert "geheim" not in report
        assert "correct-horse" not in report
        assert all(line.isprintable() for line in report.splitlines())
