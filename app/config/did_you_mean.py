"""Suggestions for a misspelt name, or one of another program."""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from app.config.groups import choices_by_group

_MAX_LISTED_NAMES = 12
_MIN_LEAF_RATIO = 0.5  # sections alone make keys alike
PROGRAMS = ("axolotl", "llama_factory", "trl", "torchtune", "others")
_OF_RUNS = "optimizer.lr"  # a key that only runs have


@cache
def other_programs() -> Sequence[dict[str, Any]]:
    """Settings of other programs, and their keys here; read at a mistake only."""
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("other_programs.yaml").read_text())
    return rows


def of_other_program(name: str, value: str = "") -> str:
    """` Did you mean optimizer.lr?` for a setting of another program; empty for any other name."""
    row = setting_of(reversed(PROGRAMS), name.lstrip("-").replace("-", "_"), value)
    here = row.get("here", "")
    choices = choices_by_group().get(here, (value,))
    if here and value and " " not in here and "=" not in here:
        here = f"{here}={value if value in choices else '|'.join(choices)}"
    return "".join(f" {part}" for part in (here and f"Did you mean {here}?", row.get("remark")) if part)


@cache
def _rows_by_name(programs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The rows of some programs, of which the first wins."""
    return {name.lower(): row for each in reversed(programs) for row in other_programs() for name in row.get(each, ())}


def setting_of(programs: Iterable[str], name: str, value: Any) -> dict[str, Any]:
    """The row of a setting of programs, by its name and value, its name, or the last part of it; else empty."""
    rows = _rows_by_name(tuple(programs))
    leaf = name.rpartition(".")[2]
    text = str(value).lower()
    wanted = (f"{name}={text}", name, f"{leaf}={text}", leaf)
    return next((rows[each.lower()] for each in wanted if each.lower() in rows), {})


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The most similar name; one with the right first letter may differ more."""
    by_lower = {name.lower(): name for name in sorted(names)}
    initial = [name for name in by_lower if name[:1] == given[:1].lower()]
    near = get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6) or get_close_matches(
        given.lower(), initial, n=1, cutoff=0.4
    )
    return by_lower[near[0]] if near else None


def nearest_keys(given: str, keys: Iterable[str]) -> list[str]:
    """The most similar dotted keys: nearly equal, begun so, with the same last part, or similar in the section."""
    known = sorted(keys)
    section, _, leaf = given.rpartition(".")
    nearly_equal = get_close_matches(given, known, n=1, cutoff=0.88)
    if nearly_equal and SequenceMatcher(None, leaf, nearly_equal[0].rpartition(".")[2]).ratio() > _MIN_LEAF_RATIO:
        return nearly_equal
    begun = [key for key in known if key.startswith(f"{given}_")]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    if begun or same_leaf:
        return [*begun, *sorted(same_leaf, key=lambda key: -SequenceMatcher(None, given, key).ratio())][:3]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    near = nearest(leaf, siblings)
    return [siblings[near]] if near else []


def did_you_mean(given: str, known: Iterable[str], *, listing: bool = True) -> str:
    """` Did you mean x?` if a name is similar, else (`listing`) the first of the valid names."""
    names = sorted(known)
    near = nearest(given, names)
    if near:
        return f" Did you mean {near}?"
    return _listed(names) if listing else ""


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:_MAX_LISTED_NAMES]) + (" and more" if len(names) > _MAX_LISTED_NAMES else "")
    return f" Known: {listed}." if names else ""


def did_you_mean_key(given: str, known: Iterable[str], value: str = "") -> str:
    """A suggestion for a dotted key, which may be given by its last part (`lr` for `optimizer.lr`)."""
    keys = sorted(known)
    meant = of_other_program(given, value) if _OF_RUNS in keys else ""
    if meant:
        return meant
    near = nearest_keys(given, keys)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    section = given.rpartition(".")[0]
    siblings = [key for key in keys if section and key.rpartition(".")[0] == section]
    return _listed(siblings) if siblings else did_you_mean(given, keys)
