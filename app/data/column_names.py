"""Names of columns that ask, that answer, that an answer needs besides, and that judge it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

# the clearest names first
ASKING = ("instruction", "question", "prompt", "query", "problem", "request", "input")
ANSWERING = ("output", "response", "answer", "completion", "solution", "reply", "target")
_SYSTEM = ("system_prompt", "system")
# Inputs that an answer needs, with the number of words from which on a text is more than a name or an id.
INPUTS: Mapping[str, int] = {
    **dict.fromkeys(("context", "passage", "document", "schema", "table", "history", "system"), 2),
    "input": 1,
}
_MORE = tuple(name for name in INPUTS if name not in ("history", "system"))
JUDGING = ("label", "labels", "kto_tag")
_MIN_TEXT_CHARS = 40  # of one word in a script without spaces


def named_like(words: Sequence[str], paths: Sequence[str]) -> str:
    """The first column path that has one of `words` as its last part or suffix; empty if none has."""
    for word in words:
        for path in paths:
            last = path.removesuffix(".*").rpartition(".")[2]
            if last == word or re.split(r"[\W_]+", last)[-1] == word:
                return path
    return ""


def pair_format(asks: str, answers: str, others: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The format of a question and its answer that reads context, history and system among the `others`, and its
    columns; no format where two inputs need one place.
    """
    inputs = [path for path in others if named_like(_MORE, [path])]
    if len(inputs) > 1:
        return "", {}
    more, history, system = "".join(inputs), named_like(["history"], others), named_like(_SYSTEM, others)
    fmt, fields = "question_answer", ("question", "answer")
    if more or history:
        fmt, fields = "instruction", ("instruction", "output")
    chosen = {fields[0]: asks, fields[1]: answers, "input": more, "history": history, "system": system}
    return fmt, {name: path for name, path in chosen.items() if path}


def is_history(found: Any) -> bool:
    """Whether it holds earlier turns, `[[question, answer], ...]`."""
    turns = found if isinstance(found, list) else []
    return bool(turns) and all(isinstance(each, list) and [*map(type, each)] == [str, str] for each in turns)


def is_prose(found: Any, name: str = "") -> bool:
    """Whether it is text of several words, not a name or an id."""
    return isinstance(found, str) and (len(found.split()) >= INPUTS.get(name, 2) or len(found) > _MIN_TEXT_CHARS)
