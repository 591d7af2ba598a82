"""Rows that must not be trained as plain text: images, video and audio, and answers that are not wanted.

Preference data come as pairs (chosen, rejected), or as single answers with a boolean label.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from app.config.dataset_schema import Columns, DatasetConfig
from app.config.row_formats import LABELLED_FORMATS, ROW_FORMATS, TAGGED_FORMATS
from app.data.columns import command, is_history, is_talk, json_file, named_like, pair_format
from app.data.conversations import SPEAKERS
from app.data.roles import INPUTS, ROLES, has_role, names_of
from app.data.types import Content, Conversation, Document, Example, Row, RowProblem, sides_of

# As LLaVA, LLaMA-Factory, Qwen-VL, Llama 3.2, Phi and Gemma write them. A tag that is closed, or quoted, is of HTML.
_PLACEHOLDER = re.compile(
    r"(?<![`'\"])<(?:(?P<tag>image|video|audio)>(?![`'\"])(?!.*</(?P=tag)>)"
    r"|img>(?=[^<>]+</img>)|\|(?:image|video|audio|vision)(?:_\w+)?\|>|start_of_image>|(?:image|audio)_soft_token>)",
    re.DOTALL | re.IGNORECASE,
)


def unsupported_column(row: Row, fmt: str, columns: Columns, config: DatasetConfig | None = None) -> str:
    """Say which column makes these rows media or preference data, and what to do; empty for other rows.

    With the section `config` the commands of the message name its path.
    """
    if media := [str(name) for name, found in row.items() if _is_media(str(name), found)]:
        return _of_media_columns(row, media, config)
    shape = ROW_FORMATS.get(fmt)
    if fmt in (*LABELLED_FORMATS, *TAGGED_FORMATS) or (shape and shape.pairs):
        return ""
    for name in _preference_columns(row, columns):
        words = _wanted_answers(row, config)
        return (
            f"column {name!r} makes this preference data (chosen and rejected answers), from which recipe=dpo, orpo and"
            " simpo learn." + (f" To train on the wanted answers alone, type: {words}" if words else "")
        )
    if shape and shape.learnt_by:
        return ""
    label = next((name for name in ROLES["label"] if _is_judged(row.get(name))), "")
    answers = names_of("messages", "answers")
    if label and not {*answers, *(getattr(columns, field, None) for field in answers)}.isdisjoint(row):
        right = json_file(config).jq_of_rows(f"select(.{label} == true) | del(.{label})")
        remedy = f"Make rows of the right ones alone: {right}, or learn from both by recipe=kto"
        remedy = remedy if label != "labels" else "Take such rows out"
        return (
            f"column {label!r} judges the answers as right or wrong (preference data, as for KTO), and all of them"
            f" would be learnt. {remedy}"
        )
    return ""


def refuse_media(content: Content) -> None:
    """RowProblem if a text has the placeholder of an image, a video or audio, or a message holds one."""
    for side in sides_of(content):
        for where, text in _texts(side):
            found = "<" in text and _PLACEHOLDER.search(text)
            if found:
                raise RowProblem(_of_media(f"{where}the placeholder {found.group()}"))
        for index, message in enumerate(side.messages if isinstance(side, Conversation) else ()):
            for key, inner in message.items():
                if _is_media(key, inner):
                    raise RowProblem(_of_media(f"message {index}: {key!r}"))


def _is_media(name: str, found: Any) -> bool:
    """Whether a column or key of this name holds media; a number says how many there are, or how long they take."""
    return bool(has_role(name, "media") and found) and not isinstance(found, bool | int | float)


def _texts(content: Conversation | Document | Example) -> Iterator[tuple[str, str]]:
    if isinstance(content, Conversation):
        yield from ((f"message {at}: ", each["content"]) for at, each in enumerate(content.messages))
    else:
        yield "", content.text
        yield "", "" if isinstance(content, Document) else content.second or ""


def _of_media_columns(row: Row, media: Sequence[str], config: DatasetConfig | None) -> str:
    without = f" Or leave it out, type: {command('auto', {}, config, leave_out=media)}"
    has_placeholder = any(_PLACEHOLDER.search(text) for text in _strings(row))
    return _of_media("column " + ", ".join(map(repr, media)), without * (not has_placeholder))


def _strings(found: Any) -> Iterator[str]:
    """Yield all texts in a row."""
    if isinstance(found, str):
        yield found
    elif isinstance(found, dict | list):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _strings(each)


def _of_media(what: str, more: str = "") -> str:
    return f"{what} stands for images, video or audio, and only text is trained here. Take such rows out.{more}"


def _preference_columns(row: Row, columns: Columns) -> Iterator[str]:
    yield from (name for name in ROLES["rejected"] if isinstance(row.get(name), str | list | dict) and row[name])
    chosen = [name for name in ROLES["chosen"] if isinstance(row.get(name), list | dict) and row[name]]
    if not chosen:
        return
    read = {str(getattr(columns, each.name)).partition(".")[0] for each in fields(columns) if each.name != "chosen"}
    yield from (name for name in chosen if name not in read)


def _is_judged(found: Any) -> bool:
    """Whether it is true or false, as a table of text may write it as well, or a list of them."""
    if isinstance(found, str):
        return found.strip().lower() in ("true", "false")
    return isinstance(found, bool) or (isinstance(found, list) and bool(found) and isinstance(found[0], bool))


def _wanted_answers(row: Row, config: DatasetConfig | None) -> str:
    """Setting to type, or a command that makes other rows, to train on the wanted answers of rows with preferences."""
    chosen = next((name for name in ROLES["chosen"] if row.get(name)), "")
    rejected = [name for name in row if has_role(name, "rejected")]
    names = [name for name in row if name not in (chosen, *rejected)]
    talk = next((name for name in names if is_talk(row[name])), "")
    last = row[talk][-1] if talk and isinstance(row[talk][-1], dict) else {}
    if not chosen or SPEAKERS.get(str(last.get("role", last.get("from")))) == "assistant":
        return command("auto", {}, config, leave_out=[*rejected, *([chosen] if chosen else [])])
    found = row[chosen]
    if talk and not (is_talk(found) and all("role" in turns[0] for turns in (row[talk], found))):
        role, text, answers = ("from", "value", "gpt") if "from" in row[talk][0] else ("role", "content", "assistant")
        turn = f'[{{{role}: "{answers}", {text}: .{_text_path(found, chosen)}}}]'
        more = f".{chosen}" if isinstance(found, list) else turn
        taken_out = ", ".join(f".{name}" for name in (chosen, *rejected))
        return json_file(config).jq_of_rows(f".{talk} += {more} | del({taken_out})")
    fmt, columns = _columns_of_wanted(row, chosen, talk, names)
    return command(fmt, columns, config, leave_out=rejected) if fmt else ""


def _columns_of_wanted(row: Row, chosen: str, talk: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The format and columns of the wanted answers; no format where nothing tells which column asks."""
    found = row[chosen]
    if talk or chosen == "preferred_output":
        return "chat_completion", {"prompt": talk or "input.messages", "completion": chosen}
    texts = [name for name in names if isinstance(row[name], str)]
    asks = named_like(ROLES["asks"], texts)
    if is_talk(found) and not (asks and len(found) == 1):
        return ("sharegpt", {"conversations": chosen}) if "from" in found[0] else ("messages", {"messages": chosen})
    path = _text_path(found, chosen)
    if not asks:
        return ("text", {"text": path}) if not texts else ("", {})
    others = [name for name in names if name != asks and (name in texts or is_history(row[name]))]
    if asks == "prompt" and path == chosen and not named_like(names_of(*INPUTS), others):
        return "prompt_completion", {"completion": chosen}
    return pair_format(asks, path, others)


def _text_path(found: Any, name: str) -> str:
    """The path of the text of an answer: a column, a message, or a list of one."""
    inner, path = (found[0], f"{name}.0") if isinstance(found, list) else (found, name)
    return f"{path}.{'value' if 'value' in inner else 'content'}" if isinstance(inner, dict) else path
