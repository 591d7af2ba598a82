"""Keys of the command line that nothing in the run reads: a kind reads the keys that its file in conf/ sets."""

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from app.config import groups
from app.config.dataset import RANDOM, paths_read
from app.config.schema import RunConfig
from app.config.validate import format_value

_SECTIONS = ("adapter", "compile", "optimizer", "preference", "quantization", "schedule", "task", "tracker")


def readers_of(key: str) -> Collection[str]:
    """The kinds of a section that read its key; empty where all do, or none has it in its file."""
    section, _, leaf = key.partition(".")
    if section not in _SECTIONS or not leaf:
        return ()
    keys = _keys_by_kind(groups.CONF / section)
    readers = [kind for kind, own in keys.items() if leaf.partition(".")[0] in own]
    return readers if len(readers) < len(keys) else ()


@cache
def _keys_by_kind(folder: Path) -> dict[str, Collection[str]]:
    return {file.stem: yaml.safe_load(file.read_text("utf-8")).keys() for file in sorted(folder.glob("*.yaml"))}


def is_unread(run: RunConfig, key: str) -> bool:
    """Whether the kind that the run has in the key's section does not read it."""
    readers = readers_of(key)
    return bool(readers) and getattr(run, key.partition(".")[0]).kind not in readers


def unread_problems(run: RunConfig, typed: Mapping[str, Any]) -> Iterator[str]:
    """Problems with the `typed` keys that change nothing; values of YAMLs may wait for another kind."""
    for key, value in typed.items():
        given, section = f"{key}={format_value(value)}", key.partition(".")[0]
        if key.startswith("model.architecture") and run.model.weights == "pretrained":
            yield (
                f"{given} would not be read: model.weights=pretrained has its numbers in the config.json beside its "
                "weights. Add model.weights=random for a model of these numbers without training."
            )
        elif key.startswith("dataset.random.") and RANDOM not in paths_read(run.dataset):
            yield f"{given}: no rows are made, so it changes nothing. Leave it out, or choose dataset=random."
        elif is_unread(run, key):
            kind = f"{section}={getattr(run, section).kind}"
            cause, wanted = f"{kind} does not read it", f"{section}={' or '.join(readers_of(key))}"
            if section == "adapter" and typed.get("recipe") == "full" and "adapter" not in typed:
                cause, wanted = "recipe=full trains no adapter", "recipe=lora"
            yield f"{given}: {cause}, so it changes nothing. Leave it out, or choose {wanted}."
