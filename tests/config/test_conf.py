"""Every file of conf/ by itself and with the others: it composes, is said to be for something, and owns its keys."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from app.config.groups import CONF, choices_by_group
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.strict import is_key, leaf_keys

FILES = sorted(CONF.rglob("*.yaml"))
CHOICES = choices_by_group()
FREE = ("experiment", "debug")  # may set any key
NEEDS_PATH = ("messages", "instruction", "prompt_completion", "text")


def test_no_file_got_lost() -> None:
    assert len(FILES) >= 43
    assert len(CHOICES) >= 13


def name_of(file: Path) -> str:
    return file.relative_to(CONF).as_posix()


def overrides(number: int, model: str, dataset: str) -> list[str]:
    """One run with this model and dataset; the other groups take turns."""
    turn = {group: names[number % len(names)] for group, names in CHOICES.items()}
    turn["optimizer"] = CHOICES["optimizer"][(number + number // 8) % len(CHOICES["optimizer"])]
    turn["recipe"] = CHOICES["recipe"][(number + number // 8 + number // 16) % len(CHOICES["recipe"])]
    turn |= {"model": model, "dataset": dataset}
    if number % 3 == 0:
        turn = {group: name for group, name in turn.items() if group not in FREE}
    turn.pop("adapter")  # the recipe's to choose
    path = ["dataset.path=rows.jsonl"] if dataset in NEEDS_PATH else []
    return [*(f"{group}={name}" for group, name in turn.items()), *path]


RUNS = [
    overrides(number, model, dataset)
    for number, (model, dataset) in enumerate(itertools.product(CHOICES["model"], CHOICES["dataset"]))
]


@pytest.mark.parametrize("chosen", RUNS, ids=range(len(RUNS)))
def test_choices_of_all_groups_go_together(chosen: list[str]) -> None:
    run = compose_run(chosen)
    for group in ("optimizer", "schedule", "attention", "precision", "tracker"):
        assert f"{group}={getattr(run, group).kind}" in chosen


def test_the_runs_above_have_every_file_and_every_pair_of_the_main_groups() -> None:
    tried = [set(chosen) for chosen in RUNS]
    for group, names in CHOICES.items():
        for name in names:
            assert group == "adapter" or any(f"{group}={name}" in chosen for chosen in tried), (group, name)
    for one, other in itertools.combinations(("model", "recipe", "dataset", "optimizer"), 2):
        if (one, other) == ("dataset", "optimizer"):
            continue  # no key of one refers to the other, and 64 runs take long
        for pair in itertools.product(CHOICES[one], CHOICES[other]):
            wanted = {f"{one}={pair[0]}", f"{other}={pair[1]}"}
            assert any(wanted <= chosen for chosen in tried), wanted


@pytest.mark.parametrize("name", CHOICES["adapter"])
def test_an_adapter_composes(name: str) -> None:
    assert compose_run([f"adapter={name}"]).adapter.kind == name


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_file_says_first_what_it_is_for(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
    assert lines[0].startswith("# ")
    assert len(lines[0].split()) >= 5, lines[0]


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_config_runs_no_code(file: Path) -> None:
    assert "_target_" not in file.read_text()


def test_a_key_has_one_owner() -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        group = "config.yaml" if file.parent == CONF else file.parent.name
        if group not in FREE:
            for key in keys_of(file):
                owners[key].add(group)
    assert {key: sorted(groups) for key, groups in owners.items() if len(groups) > 1} == {}
    assert owners["optimizer.lr"] == {"recipe"}
    unowned = [key for key in leaf_keys(RunConfig) if key not in owners]
    assert unowned == []


def keys_of(file: Path) -> Iterator[str]:
    """The dotted keys that a file sets."""
    text = file.read_text()
    content = yaml.safe_load(text)
    for name in ("defaults", "hydra"):
        content.pop(name, None)
    is_global = file.parent == CONF or text.startswith("# @package _global_")
    yield from _leaves(content, "" if is_global else f"{file.parent.name}.")


def _leaves(content: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in content.items():
        path = f"{prefix}{key}"
        assert is_key(RunConfig, path), path
        if isinstance(value, dict) and path not in leaf_keys(RunConfig):
            yield from _leaves(value, f"{path}.")
        else:
            yield path


def test_what_is_given_wins_over_what_a_file_says() -> None:
    run = compose_run(["recipe=lora", "adapter.r=4", "optimizer=sgd", "experiment=first_run", "model=llama"])
    assert (run.adapter.r, run.optimizer.kind, run.model.path.partition("/")[0]) == (4, "sgd", "meta-llama")


def test_recipes_take_the_models_suggestion() -> None:
    file = OmegaConf.load(CONF / "model" / "llama.yaml")
    lora, full = (compose_run(["model=llama", f"recipe={recipe}"]) for recipe in ("lora", "full"))
    assert lora.optimizer.lr == file.suggest.lr_adapter
    assert full.optimizer.lr == file.suggest.lr_full
    assert (lora.adapter.kind, full.adapter.kind) == ("lora", "none")
    assert (lora.batching.tokens, lora.dataset.max_length) == (file.suggest.tokens, file.suggest.length)


@pytest.mark.parametrize("experiment", CHOICES["experiment"])
def test_an_experiment_sets_only_what_differs(experiment: str) -> None:
    assert compose_run([f"experiment={experiment}"])
