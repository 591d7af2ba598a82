"""Columns at which a run stops: media, rejected answers, and unread columns that answers may need.

Each message has the commands to read the column, to make rows without it, or to ignore it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from app.config.kinds import CHAT_OF, ROW_FORMATS, WITHOUT_ANSWERS, fields_of, recipes_of
from app.config.schema import Columns, DatasetConfig
from app.data.advised_commands import check_of_converted, command, json_file, pair_format
from app.data.columns import EVERY_ELEMENT, JOIN, as_text, choices_of, optional, thought_column, value
from app.data.conversations import SPEAKERS, speaker_of
from app.data.roles import (
    CHOICE,
    INPUTS,
    JUDGING,
    ROLES,
    has_role,
    is_history,
    is_prose,
    is_talk,
    judgment,
    named_like,
    names_of,
)
from app.data.rows import Content, Conversation, Document, Example, RenderedText, Row, RowProblem, TokenIds, sides_of

if TYPE_CHECKING:
    from app.data.chat_template import TemplateNames

_PAIRS = ("instruction", "question_answer", "prompt_completion")  # formats with a question and an answer
_TALKS = ("messages", "conversations", "prompt")  # fields that may include a system message
_TEXT_KEYS = ("text", "content", "value")  # text keys of an answer object
_PARENTS = ("parent_id", "parent_message_id")  # columns of a table of messages
THOUGHT_TEMPLATE = "qwen3"  # built-in template with reasoning
# Placeholders of LLaVA, LLaMA-Factory, Qwen-VL, Llama 3.2, Phi and Gemma. Closed or quoted tags are HTML.
_PLACEHOLDER = re.compile(
    r"(?<![`'\"])<(?:(?P<tag>image|video|audio)>(?![`'\"])(?!.*</(?P=tag)>)"
    r"|img>(?=[^<>]+</img>)|\|(?:image|video|audio|vision)(?:_\w+)?\|>|start_of_image>|(?:image|audio)_soft_token>)",
    re.DOTALL | re.IGNORECASE,
)


def refused_column(row: Row, fmt: str, columns: Columns, config: DatasetConfig | None = None) -> str:
    """Return the problem of media or preference columns, with the fix; empty for other rows.

    With the section `config`, the commands in the message have its path.
    """
    if media := [str(name) for name, cell in row.items() if _is_media(str(name), cell)]:
        return _of_media_columns(row, media, config)
    shape = ROW_FORMATS[fmt]
    if shape.content in ("labels", "tags", "ids") or shape.pairs:
        return ""
    if name := _preference_column(row, columns):
        words = _chosen_answers(row, config)
        message = f"column {name!r} makes this preference data (chosen and rejected answers): "
        message += f"set {' or '.join(recipes_of('preference'))}."
        return message + (f" To train only on the chosen answers, type: {words}" if words else "")
    label = next((name for name in ROLES["label"] if _is_true_or_false(row.get(name))), "")
    answers = names_of("messages", "answers")
    if shape.learnt_by or not label or {*answers, *(getattr(columns, name, None) for name in answers)}.isdisjoint(row):
        return ""
    right = json_file(config).jq_of_rows(f"select(.{label} == true) | del(.{label})")
    remedy = f"To keep only the good ones, type: {right}, or train on both with recipe=kto"
    return (
        f"column {label!r} labels the answers as good or bad (KTO data), but all of them would be trained on."
        f" {remedy if label != 'labels' else 'Remove these rows'}"
    )


def refuse_media(content: Content) -> None:
    """Raise RowProblem if a text has a placeholder for media, or a message has media."""
    for side in sides_of(content):
        for where, text in _texts(side):
            placeholder = "<" in text and _PLACEHOLDER.search(text)
            if placeholder:
                raise RowProblem(_of_media(f"{where}the placeholder {placeholder.group()}"))
        for index, message in enumerate(side.messages if isinstance(side, Conversation) else ()):
            for key, inner in message.items():
                if _is_media(key, inner):
                    raise RowProblem(_of_media(f"message {index}: {key!r}"))


def _is_media(name: str, cell: Any) -> bool:
    """Return whether a column or key has media; numbers are counts or durations."""
    return bool(has_role(name, "media") and cell) and not isinstance(cell, bool | int | float)


def _texts(content: Conversation | Document | Example | TokenIds) -> Iterator[tuple[str, str]]:
    if isinstance(content, Conversation):
        yield from ((f"message {at}: ", message["content"]) for at, message in enumerate(content.messages))
    elif not isinstance(content, TokenIds):
        yield "", content.text
        yield "", "" if isinstance(content, Document) else content.second or ""


def _of_media_columns(row: Row, media: Sequence[str], config: DatasetConfig | None) -> str:
    without = f" Or, to ignore it, type: {command('auto', {}, config, leave_out=media)}"
    has_placeholder = any(_PLACEHOLDER.search(text) for text in _strings(row))
    return _of_media("column " + ", ".join(map(repr, media)), without * (not has_placeholder))


def _strings(part: Any) -> Iterator[str]:
    """Yield all texts of a row."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for element in part.values() if isinstance(part, dict) else part:
            yield from _strings(element)


def _of_media(what: str, more: str = "") -> str:
    return f"{what} refers to images, video or audio, but only text is supported. Remove these rows.{more}"


def _preference_column(row: Row, columns: Columns) -> str:
    """Return the column with rejected answers, or an unread one with chosen answers; empty if there is none."""
    rejected = (name for name in ROLES["rejected"] if isinstance(row.get(name), str | list | dict) and row[name])
    chosen = [name for name in ROLES["chosen"] if isinstance(row.get(name), list | dict) and row[name]]
    first = next(rejected, "")
    if first or not chosen:
        return first
    read = {str(getattr(columns, f.name)).partition(".")[0] for f in fields(columns) if f.name != "chosen"}
    return next((name for name in chosen if name not in read), "")


def _is_true_or_false(cell: Any) -> bool:
    """Return whether the value is a boolean, also as text, or a list of them."""
    first = cell[0] if isinstance(cell, list) and cell else cell
    return isinstance(first, bool) or (isinstance(cell, str) and cell.strip().lower() in ("true", "false"))


def _chosen_answers(row: Row, config: DatasetConfig | None) -> str:
    """Return the command that trains the chosen answers of preference rows, or converts them to rows."""
    chosen = next((name for name in ROLES["chosen"] if row.get(name)), "")
    rejected = [name for name in row if has_role(name, "rejected")]
    names = [name for name in row if name not in (chosen, *rejected)]
    talk = next((name for name in names if is_talk(row[name])), "")
    if not chosen or (talk and speaker_of(row[talk][-1]) == "assistant"):
        return command("auto", {}, config, leave_out=[*rejected, *([chosen] if chosen else [])])
    cell = row[chosen]
    if talk and not (is_talk(cell) and all("role" in turns[0] for turns in (row[talk], cell))):
        role, text, answers = ("from", "value", "gpt") if "from" in row[talk][0] else ("role", "content", "assistant")
        turn = f'[{{{role}: "{answers}", {text}: .{_text_path(chosen, cell) or chosen}}}]'
        more = f".{chosen}" if isinstance(cell, list) else turn
        taken_out = ", ".join(f".{name}" for name in (chosen, *rejected))
        return json_file(config).jq_of_rows(f".{talk} += {more} | del({taken_out})")
    fmt, columns = _columns_of_chosen(row, chosen, talk, names)
    return command(fmt, columns, config, leave_out=rejected) if fmt else ""


def _columns_of_chosen(row: Row, chosen: str, talk: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the format and columns of the chosen answers; an empty format if there is no prompt column."""
    cell = row[chosen]
    if talk or chosen == "preferred_output":
        return "chat_completion", {"prompt": talk or "input.messages", "completion": chosen}
    texts = [name for name in names if isinstance(row[name], str)]
    asks = named_like(ROLES["asks"], texts)
    if is_talk(cell) and not (asks and len(cell) == 1):
        return ("sharegpt", {"conversations": chosen}) if "from" in cell[0] else ("messages", {"messages": chosen})
    path = _text_path(chosen, cell) or chosen
    if not asks:
        return ("text", {"text": path}) if not texts else ("", {})
    others = [name for name in names if name != asks and (name in texts or is_history(row[name]))]
    if asks == "prompt" and path == chosen and not named_like(names_of(*INPUTS), others):
        return "prompt_completion", {"completion": chosen}
    return pair_format(asks, path, others)


def _text_path(name: str, cell: Any, element: str = ".0") -> str:
    """Return the text path of an answer: a column, a message, or an `element` of a list; empty if there is none."""
    is_list = isinstance(cell, list) and bool(cell)
    inner, path = (cell[0], f"{name}{element}") if is_list else (cell, name)
    if isinstance(inner, str):
        return path
    key = next((key for key in _TEXT_KEYS if isinstance(inner, dict) and isinstance(inner.get(key), str)), "")
    return f"{path}.{key}" if key else ""


class Way(StrEnum):
    """Way to read a missed column."""

    FIELD = "field"  # field of `dataset.columns`
    CHAT = "chat"  # field of the chat format of the task
    SYSTEM_MESSAGE = "system message"  # to which jq appends the column
    THREAD = "thread"  # conversations that jq makes from a table of messages
    TEMPLATE = "template"  # a chat template with reasoning
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Place to read a missed column."""

    field: str = ""
    paths: tuple[str, ...] = ()  # existing columns of the field, key of the system message, or IDs of the thread
    first: bool = False  # before the existing columns
    way: Way = Way.FIELD


_NOWHERE = ColumnPlace(way=Way.NONE)


@dataclass(frozen=True, slots=True)
class ReadRow:
    """Row with its samples and settings."""

    config: DatasetConfig
    row: Row
    content: Content
    samples: Sequence[RenderedText]
    template: "TemplateNames"

    @property
    def _fields(self) -> Sequence[str]:
        return fields_of(self.config.format)

    @property
    def _lacks_prompt(self) -> bool:
        """Whether preference answers lack a prompt."""
        side = sides_of(self.content)[0]
        has_prompt = not isinstance(side, Document) or side.completion_start
        return bool(ROW_FORMATS[self.config.format].learnt_by) and not has_prompt

    def missed(self, names: Sequence[str]) -> Iterator[tuple[str, ColumnPlace | None]]:
        """Yield unread columns with text that no sample has, and their place; None if no answer needs them."""
        choices = [name for name in names if CHOICE.fullmatch(name)]
        for name in names:
            cell = value(self.row, name)
            if name in self._fields and getattr(self.config.columns, name) != name:
                continue  # intentionally null or another column
            if has_role(name, *JUDGING):
                if self.config.format not in WITHOUT_ANSWERS and _is_number_of_judgment(cell):
                    yield name, None
            elif has_role(name, "history") and is_history(cell):
                yield name, ColumnPlace("history") if self.config.format in _PAIRS else _NOWHERE
            elif self._is_missed(name, cell, is_choice=len(choices) > 1 and name in choices):
                yield name, self._place(name, cell, is_choice=name in choices)

    def _is_missed(self, name: str, cell: Any, *, is_choice: bool) -> bool:
        """Return whether the column has text that an answer may need and no sample has."""
        if self.config.format == "text" and has_role(name, "answers"):
            path, is_class = _text_path(name, cell), name == "target" and not is_prose(cell)
            return bool(path) and not (is_class and path == name) and not self._has_text(value(self.row, path))
        if self.config.format == "text" and _is_of_thread(self.row, name, cell):
            return True
        if is_talk(cell):
            return self._lacks_prompt
        if has_role(name, "reasoning") and (self.config.thinking == "drop" or self.config.columns.reasoning is None):
            return False
        if has_role(name, "choices") and (choices := choices_of(cell)):
            return not all(self._has_text(text) for _, text in choices)
        text = as_text(cell, name)
        is_short_one = is_choice or (self._lacks_prompt and has_role(name, "asks"))
        return text is not None and (is_short_one or is_prose(text, name)) and not self._has_text(text)

    def _has_text(self, text: str) -> bool:
        """Return whether a sample contains this text."""
        words = " ".join(text.split())
        return any(text.strip() in sample.text or words in " ".join(sample.text.split()) for sample in self.samples)

    def _place(self, name: str, cell: Any, *, is_choice: bool) -> ColumnPlace | None:
        """Return the place to read a missed column; None if no answer needs it."""
        fmt = self.config.format
        if fmt in WITHOUT_ANSWERS:
            is_default = fmt == "text" and self.config.columns.text == "text"  # another column is intentional
            return self._place_next_to_text(name, cell) if is_default else None
        if has_role(name, "reasoning"):
            return self._place_of_thought(name)
        if not (is_choice or self._lacks_prompt or has_role(name, *INPUTS, "choices")):
            return None
        if fmt in _PAIRS:
            return self._in_field("system" if has_role(name, "system") else "input")
        if ROW_FORMATS[fmt].learnt_by:
            return self._place_in_prompt(name, cell)
        return self._place_in_system(cell)

    def _place_next_to_text(self, name: str, cell: Any) -> ColumnPlace | None:
        """Return the place to read a column next to a plain text; None if the text does not need it."""
        if has_role(name, "answers"):
            return ColumnPlace("answer", (_text_path(name, cell, EVERY_ELEMENT),))
        if _is_of_thread(self.row, name, cell):
            return ColumnPlace(paths=_keys_of_thread(self.row), way=Way.THREAD)
        return ColumnPlace("question") if has_role(name, "asks") else None

    def _place_in_prompt(self, name: str, cell: Any) -> ColumnPlace:
        """Return the place of the column in the prompt of preference answers."""
        is_system = has_role(name, "system")
        talk = next((inner for inner in self.row.values() if is_talk(inner)), None)
        if self._lacks_prompt and (self.template.is_there or talk is not None):
            in_system = is_system or talk not in (None, cell)
            return ColumnPlace("system") if in_system else ColumnPlace("prompt", way=Way.CHAT)
        asked = optional(self.row, self.config.columns.prompt)
        if isinstance(asked, list | dict) or (is_system and "system" in self._fields):
            return self._place_in_system(cell)
        return self._in_field("prompt", first=is_system)

    def _place_in_system(self, cell: Any) -> ColumnPlace:
        """Return the place of the column in the system message."""
        side = sides_of(self.content)[0]
        messages = side.messages if isinstance(side, Conversation) else []
        if not messages or messages[0]["role"] != "system" or optional(self.row, self.config.columns.system):
            return self._in_field("system")
        talks = (path for field in _TALKS if field in self._fields and (path := getattr(self.config.columns, field)))
        column = next((path for path in talks if is_talk(self.row.get(path))), "")
        if not column or not isinstance(cell, str):
            return _NOWHERE
        text = "value" if "from" in self.row[column][0] else "content"
        return ColumnPlace(paths=(f".{column}[0].{text}",), way=Way.SYSTEM_MESSAGE)

    def _place_of_thought(self, name: str) -> ColumnPlace:
        """Return the place to read reasoning."""
        if self.template.writes_thoughts:
            is_free = "reasoning" in self._fields and name != thought_column(self.row, self.config.columns)
            return ColumnPlace("reasoning") if is_free else _NOWHERE
        if self.config.format in _PAIRS:
            return self._in_field(ROW_FORMATS[self.config.format].needs[1], first=True)
        return ColumnPlace(way=Way.TEMPLATE) if "reasoning" in self._fields else _NOWHERE

    def _in_field(self, field: str, *, first: bool = False) -> ColumnPlace:
        """Return the place before or after the column that the field reads in this row."""
        path = getattr(self.config.columns, field)
        is_read = field in self._fields and optional(self.row, path)
        return ColumnPlace(field, (path,) if is_read else (), first)


def _is_number_of_judgment(cell: Any) -> bool:
    """Return whether the value is 0 or 1, also as text."""
    return not isinstance(cell, bool | list | dict) and not _is_true_or_false(cell) and judgment(cell) is not None


def _is_of_thread(row: Row, name: str, cell: Any) -> bool:
    """Return whether a column has the role or parent of a message in a table of messages."""
    if name in _PARENTS:
        return "role" in row
    return name == "role" and str(cell).lower() in (*SPEAKERS, "prompter")


def _keys_of_thread(row: Row) -> tuple[str, ...]:
    """Return the columns with the IDs of a message and its parent; empty if one is missing."""
    names = [next((name for name in names if name in row), "") for names in (("message_id", "id"), _PARENTS)]
    return tuple(names) if all(names) else ()


def unread_problems(
    config: DatasetConfig,
    key: str,
    rows: int,
    missed: Mapping[str, int],
    places: Mapping[str, ColumnPlace],
    unread: Mapping[str, int],
) -> Iterator[str]:
    """Yield the errors of unread columns that stop a run, for the source with this section.

    `missed` counts the rows whose column has text that no sample has, `unread` the rows with a value in the column.
    """
    fmt = config.format
    places = {name: place for name, place in places.items() if 2 * missed[name] > rows or place.way is Way.THREAD}
    judging = [name for name in missed if has_role(name, *JUDGING) and missed[name] == unread.get(name)]
    without = command(fmt, _columns_of(fmt, config.columns), config, key, [*places, *judging])
    if places:
        counted = ", ".join(f"{name} ({missed[name]:,} of {rows:,} rows)" for name in places)
        why = "but the answers may need it"
        if fmt == "text":
            why = f"so only {config.columns.text} would be trained"
        elif any(place.field == "prompt" and not (place.paths or place.first) for place in places.values()):
            why = "so the answers would be trained without their prompt"
        yield (
            f"not read, {why}: {counted}. To read it, {_how(config, key, places)}\n"
            f"    To train without it, type: {without}"
        )
    for name in judging:
        right = json_file(config).jq_of_rows(f"select((.{name} | tonumber) == 1) | del(.{name})")
        yield (
            f"column {name!r} is 0 or 1 in {missed[name]:,} of {rows:,} rows, which labels the answers as bad"
            " or good (KTO data), but all of them would be trained on. To keep only the good ones, type:"
            f" {right}\n    If it does not label answers, type: {without}"
        )


def _how(config: DatasetConfig, key: str, places: Mapping[str, ColumnPlace]) -> str:
    """Return the command that reads the columns, or advice if no command can."""
    thread = next((place for place in places.values() if place.way is Way.THREAD), None)
    if thread is not None:
        if not thread.paths:
            return "convert each conversation to a row of messages"
        return f"convert each answer to a conversation: {_jq_of_thread(config, *thread.paths)}"
    if all(place.way is Way.SYSTEM_MESSAGE for place in places.values()):
        [text] = next(iter(places.values())).paths
        joined = " + ".join(f'"\\n\\n" + .{name}' for name in places)
        taken = ", ".join(f".{name}" for name in places)
        return f"type: {json_file(config).jq_of_rows(f'{text} += {joined} | del({taken})')}"
    reading = _reading(config.format, config.columns, places)
    if reading is None:
        return "add its text to a column that is read"
    has_template = any(place.way is Way.TEMPLATE for place in places.values())
    template = f" model.chat_template={THOUGHT_TEMPLATE}" if has_template else ""
    return f"type: {command(*reading, config, key)}{template}"


def _jq_of_thread(config: DatasetConfig, name: str, parent: str) -> str:
    """Return the commands that convert each answer in a table of messages to a conversation and train it."""
    speakers = ", ".join(f'"{speaker}"' for speaker, role in SPEAKERS.items() if role == "assistant")
    role = f'(if .role | IN({speakers}) then "assistant" elif .role == "system" then "system" else "user" end)'
    turns = f"[recurse($all[.{parent} | tostring] // empty)] | reverse | map({{role: {role}, content: .text}})"
    program = f"INDEX(.{name}) as $all | .[] | select(.role | IN({speakers})) | {{messages: ({turns})}}"
    file = json_file(config)
    return f"{file.jq_of_rows(program, of_all=True)} && {check_of_converted(file)} dataset.train_on=last"


def _reading(fmt: str, columns: Columns, places: Mapping[str, ColumnPlace]) -> tuple[str, dict[str, str]] | None:
    """Return the format and columns that also read the columns of `places`; None if there is none."""
    ways = {place.way for place in places.values()}
    if ways & {Way.NONE, Way.SYSTEM_MESSAGE}:
        return None
    if fmt == "text":
        return _reading_of_text(columns.text, places)
    read, renamed = _columns_of(fmt, columns), dict[str, str]()
    fields = dict.fromkeys(place.field for place in places.values() if place.field)
    if Way.CHAT in ways or not fields.keys() <= {*fields_of(fmt)}:
        if fmt in _PAIRS:
            renamed = dict(zip(ROW_FORMATS[fmt].needs, ROW_FORMATS["instruction"].needs, strict=True))
            read |= {new: getattr(columns, field) for field, new in renamed.items()}
            fmt = "instruction"
        else:
            fmt = CHAT_OF.get(fmt, fmt)
    if "history" in places and places["history"].field != "history":
        read["history"] = "null"
    read |= {renamed.get(field, field): _joined(field, places) for field in fields}
    return fmt, {field: path for field, path in read.items() if field in fields_of(fmt)}


def _joined(field: str, places: Mapping[str, ColumnPlace]) -> str:
    """Return the joined path of the existing and added columns of a field."""
    here = {name: place for name, place in places.items() if place.field == field}
    first = [name for name, place in here.items() if place.first]
    existing = next((place.paths for place in here.values() if place.paths), ())
    return JOIN.join([*first, *existing, *(name for name in here if name not in first)])


def _reading_of_text(text: str, places: Mapping[str, ColumnPlace]) -> tuple[str, dict[str, str]]:
    """Return the format and columns of a question and answer, one of which is the plain text."""
    asks = next((name for name, place in places.items() if place.field == "question"), "")
    answers = next((path for place in places.values() for path in place.paths), "")
    if asks and answers:
        return "instruction", {"instruction": asks, "output": answers, "input": text}
    return "question_answer", {"question": asks or text, "answer": answers or text}


def _columns_of(fmt: str, columns: Columns) -> dict[str, str]:
    """Return the column of each field of the format; null if it reads none."""
    return {field: getattr(columns, field) or "null" for field in fields_of(fmt)}
