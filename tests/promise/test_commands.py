"""A check of finetune check is its name, a function and a section; an option of a command is a field of its schema."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from app import check as command
from app.config import commands
from app.errors import ConfigError
from app.pages import check_page
from app.pages.page import Facts, Section
from app.tracking.console import Console


def test_toy_check_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def letters(config: commands.CheckConfig, _console: Console) -> dict[str, Any]:
        return {"letters": len(config.run.model.path), "stops": []}

    def sections(facts: check_page.CheckFacts) -> list[Section]:
        return [Section("Letters", [Facts([("letters", str(facts["letters"]))])], label="letters")]

    monkeypatch.setattr(commands, "CHECKS", (*commands.CHECKS, "letters"))
    monkeypatch.setitem(command._CHECKS, "letters", letters)
    monkeypatch.setitem(check_page.SECTIONS, "letters", sections)
    config = commands.check_config(["letters", "model.path=asset:tiny", f"output_dir={tmp_path}"])
    assert command.check(config, Console(enabled=False)) == 0
    assert "letters   10" in capsys.readouterr().out
    assert json.loads((tmp_path / "check.json").read_text())["letters"] == {"letters": 10, "stops": []}
    assert "Letters" in (tmp_path / "check.html").read_text()


def test_toy_option_is_parsed_and_listed_with_the_others() -> None:
    @dataclass
    class Options(commands.GenerateConfig):
        toy: int = 3

    toy_command = replace(commands.GENERATE, schema=Options)
    assert toy_command.parse(["run=r", "prompt=Hi", "toy=5"]) == Options(run="r", prompt="Hi", toy=5)
    with pytest.raises(ConfigError, match=r"Unknown setting toyz\. Did you mean toy"):
        toy_command.parse(["run=r", "prompt=Hi", "toyz=5"])
