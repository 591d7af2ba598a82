"""Validation of plain data: types, limits, names, all problems at once."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from app.config.load import compose_run, read_run
from app.config.schema import RunConfig
from app.config.validate import parse_section
from app.errors import CheckpointError, ConfigError
from tests.config.small import data_with, problems_in, run_with

WRONG: list[tuple[str, Any, str]] = [
    ("seed", "x", "seed=x: expected a whole number."),
    ("seed", 1.5, "seed=1.5: expected a whole number."),
    ("seed", True, "seed=true: expected a whole number."),
    ("seed", 2**32, "seed=4294967296 must be at least 0 and at most 4294967295."),
    ("training.max_steps", 2.5, "training.max_steps=2.5: expected a whole number or null."),
    ("training.epochs", float("inf"), "training.epochs=inf must be a finite number."),
    ("optimizer.lr", float("nan"), "optimizer.lr=nan must be a finite number."),
    ("optimizer.lr", 0, "optimizer.lr=0.0 must be above 0."),
    ("dry_run", "maybe", "dry_run=maybe: expected true or false."),
    ("training.rehearse", "no way", "training.rehearse=no way: expected true, false or auto."),
    ("launch.num_processes", "all", "launch.num_processes=all: expected a whole number or auto."),
    ("training.recompute", "some", "training.recompute=some: expected true, false, a whole number or auto."),
    ("output_dir", "", "output_dir= is empty. Give a value."),
    ("resume", "", "resume= is empty. Give a value, or resume=null."),
    ("resume", True, "resume=true: expected text (in quotes, where it looks like something else) or null."),
    ("model.revision", 1e5, "model.revision=100000.0: expected text"),
    ("model.path", ["a", None], "model.path=[a, null]: expected text"),
    ("adapter.targets", "q_proj", "adapter.targets=q_proj: expected a list like [a, b]."),
    ("adapter.targets", ["q_proj", None], "adapter.targets=[q_proj, null]: expected a list like [a, b]."),
    ("model.architecture", 3, "model.architecture=3: expected a mapping like {a: 1, b: 2}."),
    ("dataset.format", "messagess", "dataset.format=messagess is none of auto, messages, sharegpt, "),
    ("checkpoint.final", "first", "checkpoint.final=first is none of last, best."),
    ("training", 3, "training=3: training is a section. Give its keys, such as training.epochs=..."),
    ("model.suggest", None, "model.suggest=null: model.suggest is a section."),
    ("dataset.path", "???", "dataset.path has no value. Give dataset.path=..."),
    ("dataset.clumns", {}, "dataset.clumns is not a key. Did you mean dataset.columns?"),
    ("learning_rate", 1, "learning_rate is not a key. Did you mean optimizer.lr?"),
    ("dataset.columns.foo", "a", "dataset.columns.foo is not a key. Known: dataset.columns.answer, "),
    ("training.clip", None, "training.clip=null: expected a number. 0 is none."),
    *(
        (key, value, "expected a whole number or a part of an epoch like 0.25epoch.")
        for key in ("eval.every", "checkpoint.every")
        for value in (1.5, "x", "0epoch", "-1epoch", "nanepoch", "epoch", "infepoch", True)
    ),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG, ids=[f"{k}={v}" for k, v, _ in WRONG])
def test_value_invalid_names_key_and_allowed(key: str, value: Any, message: str) -> None:
    (problem,) = problems_in({key: value})
    assert message in problem


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("seed", "7", 7),
        ("eval.every", "7", 7),
        ("eval.every", "0.25epoch", "0.25epoch"),
        ("checkpoint.every", "2 epochs", "2epoch"),
        ("optimizer.lr", 1, 1.0),
        ("optimizer.lr", "1e-5", 1e-5),
        ("dry_run", "yes", True),
        ("dry_run", 0, False),
        ("training.max_steps", None, None),
        ("output_dir", 2024, "2024"),
        ("output_dir", "${HOME}", "${HOME}"),
        ("adapter.targets", ["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        ("tracker.project", "", ""),
        *(("training.recompute", given, given) for given in (True, False, 0, 1, 7, "auto")),
    ],
)
def test_value_valid_is_converted(key: str, value: Any, read: Any) -> None:
    place: Any = run_with({key: value})
    for name in key.split("."):
        place = getattr(place, name)
    assert (place, type(place)) == (read, type(read))


def test_key_missing_reported() -> None:
    data = data_with({})
    del data["training"], data["seed"]
    with pytest.raises(ConfigError) as refusal:
        parse_section(RunConfig, data)
    assert "seed has no value. Give seed=..." in refusal.value.problems
    assert "training.clip has no value. Give training.clip=..." in refusal.value.problems


@pytest.mark.parametrize(
    "overrides", [[], ["recipe=full", "model=llama"], ["tracker=wandb", "adapter.targets=[q_proj,v_proj]"]]
)
def test_run_yaml_round_trip(overrides: list[str], tmp_path: Path) -> None:
    run = compose_run(overrides)
    file = tmp_path / "run.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(run))))
    assert read_run(file) == run


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "just words", "seed: x\n", "\x00", None])
def test_run_yaml_malformed_refused(text: str | None, tmp_path: Path) -> None:
    """None: there is no such file."""
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.yaml cannot be read as the configuration of a run: "):
        read_run(file)
