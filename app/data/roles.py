"""Column roles: usual column names of training data, and checks of their values.

They determine the format of the rows, the columns that stop a run, and the suggested settings.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any

# Most specific names first, in lower case. `input` alone is a prompt; next to an instruction it is context.
ROLES: Mapping[str, tuple[str, ...]] = {
    "asks": ("instruction", "question", "prompt", "query", "problem", "request", "input"),
    "answers": (
        *("output", "response", "answer", "completion", "solution", "reply", "target", "summary", "highlights"),
        *("outputs", "responses", "completions", "replies"),
    ),
    "context": (
        *("context", "passage", "paragraph", "document", "article", "evidence", "schema", "table", "create_table"),
        *("contexts", "passages", "paragraphs", "documents", "input"),
    ),
    "history": ("history",),
    "system": ("system_prompt", "system", "system_message", "persona"),
    "choices": ("choices", "options"),
    "reasoning": (
        *("reasoning", "reasoning_content", "thinking", "rationale", "complex_cot", "cot", "chain_of_thought"),
        *("thought", "thoughts"),
    ),
    "label": ("label", "labels", "kto_tag"),
    "reward": ("reward", "score"),
    "chosen": ("chosen", "chosen_response", "chosen_messages", "preferred_output"),
    "rejected": (
        *("rejected", "rejected_response", "rejected_messages", "rejected_output", "rejected_answer"),
        *("response_rejected", "non_preferred_output"),
    ),
    "messages": ("messages", "conversations"),
    "media": tuple(
        f"{kind}{plural}{place}"
        for kind, plural, place in product(
            ("image", "video", "audio"),
            ("", "s"),
            ("", *map("".join, product(("", "_"), ("path", "url", "file", "bytes"), ("", "s")))),
        )
    ),
    "about": (
        *("id", "idx", "index", "uid", "uuid", "source", "dataset", "category", "topic", "type", "level", "difficulty"),
    ),
}
NUMERIC_ANSWERS = ("output", "answer", "solution", "response", "completion", "ground_truth")  # others may be counts
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # labels of an answer
CHOICE = re.compile(r"[A-F]|(?:option|choice|ans|op)_?[a-fA-F0-9]")  # columns with one choice
INPUTS = ("context", "history", "system")  # roles that an answer may need
JUDGING = ("label", "reward")
_MIN_WORDS = {"input": 1}  # of a meaningful text; fewer words are a name or an ID
_MIN_TEXT_CHARS = 40  # of a single word, for scripts without spaces


@cache
def names_of(*roles: str) -> tuple[str, ...]:
    """Return all names of the roles, most specific first."""
    return tuple(dict.fromkeys(name for role in roles for name in ROLES[role]))


def has_role(name: str, *roles: str) -> bool:
    """Return whether a column of this name has one of the roles."""
    return not _roles_of(name).isdisjoint(roles)


@lru_cache(maxsize=1024)  # called for every column of every row
def _roles_of(name: str) -> frozenset[str]:
    return frozenset(role for role, names in ROLES.items() if name.lower() in names)


def named_like(words: Sequence[str], paths: Sequence[str]) -> str:
    """Return the first column path with one of `words` as its last part or suffix; empty if there is none."""
    for word in words:
        for path in paths:
            last = path.removesuffix(".*").rpartition(".")[2]
            if last == word or re.split(r"[\W_]+", last)[-1] == word:
                return path
    return ""


def is_prose(value: object, name: str = "") -> bool:
    """Return whether the value is text of several words instead of a name or an ID."""
    if not isinstance(value, str):
        return False
    return len(value.split()) >= _MIN_WORDS.get(name, 2) or len(value) > _MIN_TEXT_CHARS


def is_number(value: object) -> bool:
    """Return whether the value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_history(value: object) -> bool:
    """Return whether the value is a list of earlier turns, `[[question, answer], ...]`."""
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, list) and [*map(type, turn)] == [str, str] for turn in turns)


def is_talk(value: object) -> bool:
    """Return whether the value is a list of messages or turns."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and ("role" in first or "from" in first)


def judgment(value: Any) -> bool | None:
    """Return the label of an answer, also from text and numbers; None for other values."""
    return LABELS.get(str(value).strip().lower())
