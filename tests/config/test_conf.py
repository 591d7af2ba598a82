"""Files of conf/: they compose, state their purpose and own their keys; --help."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from app.config.conf_files import CONF, choices_by_group
from app.config.help import train_help
from app.config.load import compose_run
from app.config.schema import RunConfig
from app.config.validate import is_key, leaf_keys
from tests.harness.composed import composed

FILES = sorted(CONF.rglob("*.yaml"))
APART = ("sweep", "hardware")  # of no run: read in tests/sweeps/test_preset.py and test_commands.py
OF_RUNS = [file for file in FILES if file.parent.name not in APART]
CHOICES = {group: names for group, names in choices_by_group().items() if group not in APART}
FREE = ("experiment", "debug")  # may set any key
OF_RECIPES = ("adapter", "preference", "quantization")  # chosen by a recipe; alone they would contradict it
RECIPES_OF_ANSWERS = {  # by their rows
    "pairs": "dpo",
    "preference": "orpo",
    "preference_text": "simpo",
    "labelled_answers": "kto",
    "preference_label": "kto",
    "preference_label_text": "kto",
}
OF_ANSWERS = tuple(RECIPES_OF_ANSWERS.values())
LABELED, TAGGED = ("labelled_text", "text_pair", "imdb"), ("tagged_words",)
OWN_ROWS = ("sample", "pairs", "labelled_answers", "styles", "alpaca", "ultrachat", "dolly", "imdb", "random", "mix")


def with_turns(chosen: dict[str, str], number: int) -> list[str]:
    """A command line with these choices, and of the other groups those whose turn it is."""
    turn = {
        group: names[(number // 3 if group in FREE else number) % len(names)]
        for group, names in CHOICES.items()
        if group not in OF_RECIPES and (number % 3 == 0 or group not in FREE)
    } | chosen
    rows = {recipe: name for name, recipe in RECIPES_OF_ANSWERS.items()}
    if "recipe" in chosen:
        turn["dataset"] = rows.get(
            turn["recipe"], "sample" if turn["dataset"] in RECIPES_OF_ANSWERS else turn["dataset"]
        )
    else:
        other = "lora" if turn["recipe"] in OF_ANSWERS else turn["recipe"]
        turn["recipe"] = RECIPES_OF_ANSWERS.get(turn["dataset"], other)
    dataset = turn["dataset"]
    # hidden tokens are those of plain text, and labels those of rows that have them
    masked = dataset == "text" and (number % 2 or not chosen)
    turn["task"] = "classification" if dataset in LABELED else "masked" if masked else "causal"
    turn["task"] = "tokens" if dataset in TAGGED else turn["task"]
    if dataset in RECIPES_OF_ANSWERS:
        del turn["task"]  # the recipe chooses it
    if turn["optimizer"] == "adafactor":  # it looks at whole tensors
        turn["parallel"] = "ddp"
    words = [f"{group}={name}" for group, name in turn.items()]
    words += ["dataset.path=rows.jsonl"] if dataset not in OWN_ROWS else []
    words += ["dataset.max_length=128"] if dataset in RECIPES_OF_ANSWERS else []  # two of them in a bin of any model
    words += ["dataset.mix.one.path=rows.jsonl"] if dataset == "mix" else []
    return [*words, "model.path=somewhere"] if turn["model"] == "folder" else words


def require_choices(words: list[str]) -> None:
    run, chosen = compose_run(words), dict(word.split("=") for word in words)
    for group in ("optimizer", "schedule", "attention", "precision", "tracker"):
        assert getattr(run, group).kind == chosen[group]


RUNS = [with_turns({}, number) for number in range(max(map(len, CHOICES.values())))]


def test_conf_all_groups_compose() -> None:
    for words in RUNS:
        require_choices(words)


def test_conf_every_file_composed() -> None:
    files = {f"{f.parent.name}={f.stem}" for f in OF_RUNS if f.parent != CONF and f.stem[0] != "_"}
    left = files - {word for words in RUNS for word in words}
    assert {word.partition("=")[0] for word in left - {"task=preference", "task=preference_label"}} == set(OF_RECIPES)


def test_conf_adapters_and_quantizations_in_recipes() -> None:
    runs = [composed(f"recipe={recipe}") for recipe in CHOICES["recipe"]]
    assert {run.adapter.kind for run in runs} == set(CHOICES["adapter"]) - {"peft"}
    by_hand = {"fp4", "int8", "llm_int8", "fp8", "qat", "int4", "mxfp4", "nvfp4"}  # in place of a recipe's own
    assert {run.quantization.kind for run in runs} == set(CHOICES["quantization"]) - by_hand


def test_conf_files_have_purpose_and_no_target() -> None:
    for file in FILES:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("# @package")]
        assert lines[0].startswith("# "), file
        assert len(lines[0].split()) >= 5, (file, lines[0])
        assert "_target_" not in file.read_text(), file


def test_conf_keys_have_one_owner() -> None:
    owners: dict[str, set[str]] = defaultdict(set)
    for file in OF_RUNS:
        group = "config.yaml" if file.parent == CONF else file.parent.name
        if group not in FREE:
            for key in keys_of(file):
                owners[key].add(group)
    assert {key: sorted(groups) for key, groups in owners.items() if len(groups) > 1} == {}
    assert owners["optimizer.lr"] == {"recipe"}
    assert [key for key in leaf_keys(RunConfig) if key not in owners] == []


def keys_of(file: Path) -> Iterator[str]:
    """The dotted keys that a file sets."""
    text = file.read_text()
    content = yaml.safe_load(text)
    content.pop("defaults", None)
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


def test_recipes_use_model_suggestions() -> None:
    file = OmegaConf.load(CONF / "model" / "llama.yaml")
    lora, full = (composed("model=llama", f"recipe={recipe}") for recipe in ("lora", "full"))
    assert lora.optimizer.lr == file.suggest.lr_adapter
    assert full.optimizer.lr == file.suggest.lr_full
    assert (lora.adapter.kind, full.adapter.kind) == ("lora", "none")
    assert (lora.batching.tokens, lora.dataset.max_length) == (file.suggest.tokens, file.suggest.length)


@pytest.mark.parametrize("experiment", CHOICES["experiment"])
def test_experiments_compose(experiment: str) -> None:
    assert compose_run([f"experiment={experiment}"])


# ---- --help


def test_help_lists_every_choice() -> None:
    text = train_help()
    for group, names in choices_by_group().items():
        assert re.search(rf"^  {group}\b", text, re.MULTILINE), group
        for name in names:
            assert re.search(rf"[ ]{re.escape(name)}\*?(\s|$)", text), (group, name)
    assert "_hub" not in text
    assert "_policy" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_help_marks_defaults() -> None:
    starred = re.findall(r"(\w+)\*", train_help())
    run = composed()
    for kind in (run.optimizer.kind, run.schedule.kind, run.adapter.kind, run.precision.kind, run.task.kind):
        assert kind in starred
    assert {"lora", "tiny", "sample"} <= set(starred)
    assert "adapter       lora* none" in train_help()
