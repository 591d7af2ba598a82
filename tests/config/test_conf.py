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
from app.config.validate import is_key, leaf_keys

FILES = sorted(CONF.rglob("*.yaml"))
APART = ("sweep", "hardware")  # of no run: read in tests/sweep/test_preset.py and test_hardware.py
OF_RUNS = [file for file in FILES if file.parent.name not in APART]
CHOICES = {group: names for group, names in choices_by_group().items() if group not in APART}
FREE = ("experiment", "debug")  # may set any key
MAIN = ("model", "recipe", "dataset", "optimizer")
OF_RECIPES = ("adapter", "quantization")  # chosen by a recipe; alone they would contradict it
LABELLED = ("labelled_text", "text_pair")
NEEDS_PATH = (
    *("auto", "messages", "sharegpt", "instruction", "question_answer"),
    *("prompt_completion", "chat_completion", "text", *LABELLED),
)


def test_no_file_got_lost() -> None:
    assert len(FILES) >= 46
    assert len(CHOICES) >= 13


def name_of(file: Path) -> str:
    return file.relative_to(CONF).as_posix()


def pairs(choice: dict[str, str]) -> set[tuple[str, str]]:
    """What a run tries of the main groups. No key of a dataset and an optimizer meet, and 56 runs would take long."""
    named = [f"{group}={name}" for group, name in choice.items() if group in MAIN]
    return {
        (one, other)
        for one, other in itertools.combinations(named, 2)
        if {one.partition("=")[0], other.partition("=")[0]} != {"dataset", "optimizer"}
    }


def covering() -> list[dict[str, str]]:
    """As few choices as a simple search finds that have every pair at least once; the other groups take turns."""
    every = [
        dict(zip(MAIN, names, strict=True))
        for names in itertools.product(*(CHOICES[group] for group in MAIN))
    ]
    left = set().union(*map(pairs, every))
    chosen: list[dict[str, str]] = []
    while left:
        best = max(every, key=lambda choice: len(pairs(choice) & left))
        left -= pairs(best)
        number = len(chosen)
        turn = {
            group: names[(number // 3 if group in FREE else number) % len(names)]
            for group, names in CHOICES.items()
            if group not in OF_RECIPES
        }
        free = number % 3 == 0
        turn |= best
        texts = sum(run["dataset"] == "text" for run in chosen)
        turn["task"] = "causal"
        if turn["dataset"] == "text":  # hidden tokens are those of plain text
            turn["task"] = ("causal", "masked")[texts % 2]
        if turn["dataset"] in LABELLED:  # and labels those of rows that have them
            turn["task"] = "classification"
        chosen.append({group: name for group, name in turn.items() if free or group not in FREE})
    return chosen


RUNS = covering()


@pytest.mark.parametrize("chosen", RUNS, ids=range(len(RUNS)))
def test_choices_of_all_groups_go_together(chosen: dict[str, str]) -> None:
    path = ["dataset.path=rows.jsonl"] if chosen["dataset"] in NEEDS_PATH else []
    path += ["dataset.mix.one.path=rows.jsonl"] if chosen["dataset"] == "mix" else []
    path += ["model.path=somewhere"] if chosen["model"] == "folder" else []
    run = compose_run([*(f"{group}={name}" for group, name in chosen.items()), *path])
    for group in ("optimizer", "schedule", "attention", "precision", "tracker"):
        assert getattr(run, group).kind == chosen[group]


def test_the_runs_above_have_every_file() -> None:
    tried = {(group, name) for chosen in RUNS for group, name in chosen.items()}
    files = {(f.parent.name, f.stem) for f in OF_RUNS if f.parent != CONF and not f.stem.startswith("_")}
    assert {group for group, _ in files - tried} == set(OF_RECIPES)


BY_HAND = {"fp8"}  # for some GPUs only: it goes with recipe=lora


def test_every_adapter_and_quantization_is_in_some_recipe() -> None:
    runs = [compose_run([f"recipe={recipe}"]) for recipe in CHOICES["recipe"]]
    assert {run.adapter.kind for run in runs} == set(CHOICES["adapter"])
    assert {run.quantization.kind for run in runs} == set(CHOICES["quantization"]) - BY_HAND


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
    for file in OF_RUNS:
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


@pytest.mark.parametrize(
    ("given", "weights", "length"),
    [
        (["model.path=some/folder"], "pretrained", 2048),
        (["++model.path='some/folder'"], "pretrained", 2048),
        (["model=llama", "model.path=some/folder"], "pretrained", 2048),
        (["model.path=asset:tiny", "model.weights=random"], "random", 256),
        ([], "pretrained", 256),
    ],
)
def test_a_path_alone_means_any_model_and_not_the_small_one(
    given: list[str], weights: str, length: int
) -> None:
    run = compose_run(given)
    assert (run.model.weights, run.dataset.max_length) == (weights, length)
