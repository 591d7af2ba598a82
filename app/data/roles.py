"""Column roles: the names under which columns of training data are known. What is read, refused or dropped follows."""

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import product

# In each role the clearest names first, in lower case. `input` asks by itself and is context next to an instruction.
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
CHOICE = re.compile(r"[A-F]|(?:option|choice|ans|op)_?[a-fA-F0-9]")  # columns of one choice each
INPUTS = ("context", "history", "system")  # roles of what an answer needs
JUDGING = ("label", "reward")
_MIN_WORDS = {"input": 1}  # of a text that says something; fewer words are a name or an id
_MIN_TEXT_CHARS = 40  # of one word in a script without spaces


@cache
def names_of(*roles: str) -> tuple[str, ...]:
    """Return all names of the roles, the clearest first."""
    return tuple(dict.fromkeys(name for role in roles for name in ROLES[role]))


def has_role(name: str, *roles: str) -> bool:
    """Return whether a column of this name has one of the roles."""
    return not _roles_of(name).isdisjoint(roles)


@lru_cache(maxsize=1024)  # asked of every column of every row
def _roles_of(name: str) -> frozenset[str]:
    return frozenset(role for role, names in ROLES.items() if name.lower() in names)


def is_prose(found: object, name: str = "") -> bool:
    """Return whether it is text of several words, not a name or an id."""
    if not isinstance(found, str):
        return False
    return len(found.split()) >= _MIN_WORDS.get(name, 2) or len(found) > _MIN_TEXT_CHARS
