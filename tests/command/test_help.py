"""Help and version of every command, printed before anything else is read or imported."""

import importlib
import sys
from contextlib import suppress
from typing import Any

import pytest

import app
from app.board import BOARD
from app.completion import COMPLETION
from app.config.command_line import Command
from app.config.commands import CHECK, GENERATE, REPORT
from app.config.finished_run import EVALUATE, EXPORT, REPRODUCE
from app.config.help import command_help, meanings, train_help
from app.convert import CONVERT
from app.errors import ConfigError
from app.schema import SCHEMA

OPTIONS: dict[str, Command[Any]] = {
    "check": CHECK,
    "generate": GENERATE,
    "evaluate": EVALUATE,
    "export": EXPORT,
    "report": REPORT,
    "convert": CONVERT,
    "board": BOARD,
    "reproduce": REPRODUCE,
    "schema": SCHEMA,
    "completion": COMPLETION,
}


def printed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with suppress(SystemExit):
        importlib.import_module(f"app.{name}").main()
    shown = capsys.readouterr()
    return shown.out, shown.err


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("train", ["  recipe\n"]),
        ("check", ["For the settings see: finetune train --help", "  answers.rows="]),
        ("generate", ["  model=", "  launch.threads=", "longest answer [a whole number, at least 1; default 256]\n"]),
        ("evaluate", ["[tuned, base, both; default tuned]", "Settings as in finetune train, "]),
        ("export", ["format of the export [adapter, merged, quantized, gguf]\n", "  to="]),
        ("report", ["  runs=", "  to="]),
        ("convert", ["Convert an Axolotl", "  to="]),
        ("schema", ["Print the JSON Schema"]),
        ("completion", ["finetune completion zsh"]),
        ("board", ["  folder=", "  port="]),
        ("reproduce", ["relative tolerance; 0: bitwise equality [a number, at least 0; default 0.0]"]),
    ],
)
def test_command_help_and_version_printed(
    name: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text, problems = printed(name, monkeypatch, capsys, "--help")
    for line in [f"finetune {name} ", *lines]:
        assert line in text
    assert max(map(len, text.splitlines())) <= 110
    assert problems == ""
    assert printed(name, monkeypatch, capsys, "--version") == (f"app-finetune {app.__version__}\n", "")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_meaning(name: str) -> None:
    text = command_help("", OPTIONS[name])
    options = [line for line in text.splitlines() if line.startswith("  ") and "=" in line.split()[0]]
    assert options
    for line in options:
        assert not line.split("=", 1)[1].lstrip().startswith("["), line


@pytest.mark.parametrize("name", ["train", *OPTIONS])
def test_help_lines_fit_a_terminal_of_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text, _ = printed(name, monkeypatch, capsys, "--help")
    long = [line for line in text.splitlines() if len(line) > 80 and not line.startswith("finetune ")]
    assert long == []


def test_help_of_a_group_lists_its_choices_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    text = train_help(["optimizer"])
    assert "    adamw*                Fused torch AdamW" in text
    assert "  optimizer.lr=" in text
    assert "peak learning rate [a number, above 0; default model.suggest.lr_adapter]" in text
    assert "(muon, sgd only)" in text
    assert "schedule." not in text
    assert train_help(["model=tiny"]) == train_help()


def test_help_of_a_section_without_choices_and_of_one_key() -> None:
    assert "CHOICE" not in train_help(["launch"])
    assert train_help(["adapter.r", "seed"]).count("=") == 2


def test_help_of_an_unknown_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"--help optimizer.lrr: unknown setting\. Did you mean optimizer\.lr\?"):
        train_help(["optimizer.lrr"])
    text, problems = printed("train", monkeypatch, capsys, "--help", "optimizer.lrr")
    assert (text, problems.count("\n")) == ("", 1)


def test_meaning_is_the_comment_after_or_above_a_field_also_of_a_base_class() -> None:
    texts = meanings(REPRODUCE.schema)
    assert texts["tolerance"] == "relative tolerance; 0: bitwise equality"
    assert texts["run"] == "output_dir of the run"
    assert texts["output_dir"] == "output folder of the run"
    assert meanings(EXPORT.schema)["quant"].startswith("quantization format; auto:")
