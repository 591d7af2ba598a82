"""Every command has its help and its version, before anything else is read or imported."""

import importlib
import sys
from contextlib import suppress

import pytest

import app


def printed(name: str, switch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, switch])
    with suppress(SystemExit):
        importlib.import_module(f"app.{name}").main()
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("train", ["  recipe"]),
        ("check", ["For the settings see: finetune train --help"]),
        ("generate", ["  model=", "  launch.threads=", "  max_new_tokens=            a whole number (default 256)\n"]),
        ("evaluate", ["  weights=         tuned, base, both (default tuned)", "As in finetune train, "]),
        ("export", ["  kind=         adapter, merged, quantized, gguf\n", "  to=           text\n"]),
        ("report", ["  runs=", "  to="]),
        ("convert", ["Convert an Axolotl"]),
        ("schema", ["Print the JSON Schema"]),
        ("completion", ["finetune completion zsh"]),
        ("board", ["  folder=", "  port="]),
        ("reproduce", ["  tolerance=   a number (default 0.0)"]),
    ],
)
def test_command_help_and_version_printed(
    name: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(name, "--help", monkeypatch, capsys)
    for each in [f"finetune {name} ", *lines]:
        assert each in text
    assert max(map(len, text.splitlines())) <= 120
    assert printed(name, "--version", monkeypatch, capsys) == f"app-finetune {app.__version__}\n"
