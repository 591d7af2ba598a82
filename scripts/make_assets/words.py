"""English words of the skills, read from words.yaml, and their inflection."""

from pathlib import Path
from typing import Any

import yaml

_LISTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))


def listed(name: str) -> list[str]:
    """Return the words of a list in words.yaml."""
    text: str = _LISTS[name]
    return text.split()


def pairs(name: str) -> list[tuple[str, str]]:
    """Return the pairs of a list in words.yaml."""
    return [(first, second) for first, second in (pair.split("/") for pair in listed(name))]


NOUNS = listed("nouns")
IRREGULAR_PLURALS = dict(pairs("irregular_plurals"))
REGULAR_VERBS = listed("regular_verbs")
IRREGULAR_PASTS = dict(pairs("irregular_pasts"))
OPPOSITES = pairs("opposites")
KINDS: dict[str, list[str]] = {kind: things.split() for kind, things in _LISTS["kinds"].items()}
SEQUENCES: list[list[str]] = [text.split() for text in _LISTS["sequences"]]


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def past(verb: str) -> str:
    """Return the past tense of a verb."""
    if verb in IRREGULAR_PASTS:
        return IRREGULAR_PASTS[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + "ed"
