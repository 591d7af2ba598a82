"""JSON Schema of settings files: it accepts what the program accepts, and reports the same mistakes."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from app.config.arguments import split_arguments
from app.config.conf_files import read_yaml, to_yaml
from app.config.json_schema import settings_schema
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.validate import field_types, leaf_keys, parse_section
from app.convert import as_file
from app.errors import ConfigError
from tests.command.test_convert import FILES, conversion
from tests.config.test_conf import RUNS

SCHEMA = settings_schema()
DEFAULTS = asdict(compose_run([]))
DEFAULT_SECTIONS = [name for name, value in DEFAULTS.items() if isinstance(value, dict)]
VALIDATOR = Draft202012Validator(SCHEMA)
NUMBERS = (0, 1, 2, 3, 1000, 1001, 2**32, -1, 0.25, 0.5, 0.75, 1.5, -0.5)
TEXTS = ("", "auto", "text", "all", "new", "balanced", "0.25epoch", "2epochs", "0epoch", ".epoch", "fp32", "last")
VALUES: tuple[Any, ...] = (
    *(None, True, False, *NUMBERS, *TEXTS),
    *([], [1], ["a"], [0.5], [True], [None], [["a"]], {}, {"a": 1}),
)


def accepted(settings: dict[str, Any]) -> bool:
    return not [*VALIDATOR.iter_errors(settings)]


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


def test_schema_is_valid_and_every_reference_resolves() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for text in {line.strip() for line in json.dumps(SCHEMA, indent=0).splitlines() if '"$ref"' in line}:
        part: Any = SCHEMA
        for name in text.split('"')[3].removeprefix("#/").split("/"):
            part = part[name]


def test_schema_describes_every_key_of_a_run() -> None:
    of_groups = {key: schema for key, schema in SCHEMA["properties"].items() if "$ref" not in schema}
    assert {*leaf_keys(RunConfig)} <= SCHEMA["properties"].keys()
    assert all(len(schema["description"]) > 5 for schema in of_groups.values())
    assert all(
        "$ref" in schema or schema["description"]
        for section in SCHEMA["$defs"].values()
        for schema in section["properties"].values()
    )


def is_parsed(key: str, value: Any) -> bool:
    """Whether a run accepts the value, with its other settings as they are by default."""
    section, _, leaf = key.rpartition(".")
    schema, data = field_types(RunConfig)[section] if section else RunConfig, DEFAULTS
    for name in section.split(".") if section else ():
        data = data[name]
    try:
        parse_section(schema, {**data, leaf: value}, f"{section}." if section else "")
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("section", ["", *DEFAULT_SECTIONS])
def test_schema_and_program_accept_the_same_values(section: str) -> None:
    keys = [key for key in leaf_keys(RunConfig) if key.rpartition(".")[0].partition(".")[0] == section]
    kinds = field_types(RunConfig)
    different = [
        (key, value)
        for key in keys
        for value in VALUES
        # 0 and 1 mean false and true to the program; the schema expects the words
        if not (kinds[key] in (bool, bool | str) and value in (0, 1) and not isinstance(value, bool))
        and {is_parsed(key, value)} != {accepted(nested(key, value)), accepted({key: value})}
    ]
    assert (different, bool(keys)) == ([], True)


@pytest.mark.parametrize("words", RUNS[::4], ids=lambda words: words[2])
def test_schema_accepts_run_yaml(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(to_yaml(asdict(compose_run(words))))
    assert [error.message for error in VALIDATOR.iter_errors(read_yaml(tmp_path / "run.yaml"))] == []


@pytest.mark.parametrize("name", FILES)
def test_schema_accepts_converted_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(as_file(conversion(name), name))
    assert [error.message for error in VALIDATOR.iter_errors(read_yaml(tmp_path / "mine.yaml"))] == []


@pytest.mark.parametrize(
    "text",
    [
        "{model: llama, recipe: qlora, dataset: data/chat.jsonl, optimizer: {lr: 2e-4}, schedule.warmup_steps: 10}",
        "{model: org/name, dataset: data/chat.jsonl, dataset.columns: {answer: reply}}",
        "{dataset: {path: chat.jsonl, columns.answer: reply, eval_path: null}, experiment: null, tracker: wandb}",
        "{dataset: mix, dataset.mix.one.path: a.jsonl, dataset.mix.two: {path: b.jsonl, weight: 2}}",
        "{dataset: {path: null, mix: {one: {path: a.jsonl}}}, eval: {every: 0.25epoch}, training.recompute: auto}",
        "{model: {weights: random, architecture.hidden_size: 64}, adapter.rank_pattern.q_proj: 4}",
    ],
)
def test_schema_and_program_accept_settings_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    compose_run(split_arguments([f"from={tmp_path / 'mine.yaml'}"])[0])
    assert accepted(read_yaml(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        "{optimizers.lr: 1e-4}",
        "{optimizer: {rl: 1e-4}}",
        "{optimizer.lr: 0}",
        "{optimizer: {lr: fast}}",
        "{recipe: qlora16}",
        "{model: lama}",
        "{optimizer: adam}",
        "{adapter: {dropout: 1}}",
        "{seed: 4294967296}",
        "{dataset.mix.one.weights: 2, dataset.mix.one.path: a.jsonl}",
        "{dataset: {mix: {one: {path: a.jsonl, weights: 2}}}}",
        "{hardware: h100}",
        "{dataset: {on_bad_row: ignore}}",
        "[recipe, qlora]",
    ],
)
def test_schema_and_program_reject_mistake(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert not accepted(read_yaml(tmp_path / "mine.yaml"))
    with pytest.raises(ConfigError):
        compose_run(split_arguments([f"from={tmp_path / 'mine.yaml'}"])[0])


def test_schema_command_writes_the_schema_and_keeps_an_existing_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "app.schema"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) == SCHEMA
    target = tmp_path / "finetune.schema.json"
    written = subprocess.run([*command, f"to={target}"], capture_output=True, text=True, check=True).stdout
    assert (written, target.read_text()) == (f"file    {target}\n", shown)
    again = subprocess.run([*command, f"to={target}"], capture_output=True, text=True, check=False)
    assert (again.returncode, "already exists" in again.stderr, target.read_text()) == (2, True, shown)
