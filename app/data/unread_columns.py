"""Columns that are not read although answers need what they say, or are judged by them: what to type instead."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.config.dataset_schema import Columns, DatasetConfig
from app.config.row_formats import CHAT_OF, ROW_FORMATS, WITHOUT_ANSWERS
from app.data.columns import (
    JOIN,
    as_text,
    choices_of,
    command,
    is_history,
    is_talk,
    jq,
    optional,
    thought_column,
    value,
)
from app.data.conversations import SPEAKERS
from app.data.formats import fields_of
from app.data.roles import CHOICE, INPUTS, JUDGING, has_role, is_prose
from app.data.types import Content, Conversation, Document, RenderedText, Row, sides_of

if TYPE_CHECKING:
    from app.data.data_report import Counts

_JUDGEMENTS = (0, 1, "0", "1", "0.0", "1.0")
_PAIRS = {
    "instruction": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "prompt_completion": ("prompt", "completion"),
}
_TALKS = ("messages", "conversations", "prompt")  # fields that may hold a system message of their own
_TEXT_KEYS = ("text", "content", "value")  # of the elements of a list of answers
_PARENTS = ("parent_id", "parent_message_id")  # columns of a table of messages
# Places that are no field of `dataset.columns`.
_TALK, _TEMPLATE, _THREAD, _OPENING = "talk", "template", "thread", "opening"
_FIRST = "<"  # in front of a place: the column comes before what is read there already
THOUGHT_TEMPLATE = "qwen3"  # one that ships and writes thoughts


class UnreadColumns:
    """Unread columns of one row that say what no sample of it does, and the field of `dataset.columns` for each."""

    def __init__(
        self,
        config: DatasetConfig,
        row: Row,
        content: Content,
        samples: Sequence[RenderedText],
        *,
        has_template: bool,
        writes_thoughts: bool,
    ) -> None:
        self._config, self._row, self._columns = config, row, config.columns
        self._fields, self._shape = fields_of(config.format), ROW_FORMATS[config.format]
        self._side = sides_of(content)[0]
        self._samples, self._has_template, self._writes_thoughts = samples, has_template, writes_thoughts
        has_prompt = not isinstance(self._side, Document) or self._side.completion_start
        self._wants_prompt = bool(self._shape.learnt_by) and not has_prompt

    def missed(self, names: Sequence[str]) -> Iterator[tuple[str, str | None]]:
        """Yield each missed column with the place where it can be read; None where no answer needs it.

        A place is a field, with what it reads now after a `=`; empty where no field can take the column.
        """
        choices = [name for name in names if CHOICE.fullmatch(name)]
        for name in names:
            found = value(self._row, name)
            if name in self._fields and getattr(self._columns, name) != name:
                continue  # null, or another column in its place, on purpose
            if has_role(name, *JUDGING):
                if self._config.format not in WITHOUT_ANSWERS and is_judgement(found):
                    yield name, None
            elif has_role(name, "history") and is_history(found):
                yield name, "history" if self._config.format in _PAIRS else ""
            elif self._is_missed(name, found, is_choice=len(choices) > 1 and name in choices):
                yield name, self._place(name, found, is_choice=name in choices)

    def _is_missed(self, name: str, found: Any, *, is_choice: bool) -> bool:
        if self._config.format == "text" and has_role(name, "answers"):
            return bool(_answer_path(name, found)) and not self._says(_first_text(found))
        if self._config.format == "text" and _is_of_thread(self._row, name, found):
            return True
        if is_talk(found):
            return self._wants_prompt
        if has_role(name, "reasoning") and (self._config.thinking == "drop" or self._columns.reasoning is None):
            return False
        said, choices = as_text(found, name), choices_of(found)
        if has_role(name, "choices") and choices:
            return not all(self._says(text) for _, text in choices)
        is_short_one = is_choice or (self._wants_prompt and has_role(name, "asks"))
        return said is not None and (is_short_one or is_prose(said, name)) and not self._says(said)

    def _says(self, said: str) -> bool:
        """Return whether a sample has this text."""
        words = " ".join(said.split())
        return any(said.strip() in each.text or words in " ".join(each.text.split()) for each in self._samples)

    def _place(self, name: str, found: Any, *, is_choice: bool) -> str | None:
        fmt = self._config.format
        if fmt in WITHOUT_ANSWERS:
            is_default = fmt == "text" and self._columns.text == "text"  # another one is chosen on purpose
            return self._place_beside_text(name, found) if is_default else None
        if has_role(name, "reasoning"):
            return self._place_of_thought(name)
        if not (is_choice or self._wants_prompt or has_role(name, *INPUTS, "choices")):
            return None
        if fmt in _PAIRS:
            return self._existing("system" if has_role(name, "system") else "input")
        return self._place_in_prompt(name, found) if self._shape.learnt_by else self._place_in_system(found)

    def _place_beside_text(self, name: str, found: Any) -> str | None:
        if has_role(name, "answers"):
            return f"answer={_answer_path(name, found)}"
        if _is_of_thread(self._row, name, found):
            return f"{_THREAD}={_keys_of_thread(self._row)}"
        return "question" if has_role(name, "asks") else None

    def _place_in_prompt(self, name: str, found: Any) -> str:
        talk = next((each for each in self._row.values() if is_talk(each)), None)
        if self._wants_prompt and (self._has_template or talk is not None):
            return "system" if has_role(name, "system") or talk not in (None, found) else _TALK
        asked = optional(self._row, self._columns.prompt)
        if isinstance(asked, list | dict) or (has_role(name, "system") and "system" in self._fields):
            return self._place_in_system(found)
        return _FIRST * has_role(name, "system") + self._existing("prompt")

    def _place_in_system(self, found: Any) -> str:
        messages = self._side.messages if isinstance(self._side, Conversation) else []
        if not messages or messages[0]["role"] != "system" or optional(self._row, self._columns.system):
            return self._existing("system")
        talks = (path for field in _TALKS if field in self._fields and (path := getattr(self._columns, field)))
        column = next((path for path in talks if is_talk(self._row.get(path))), "")
        if not column or not isinstance(found, str):
            return ""
        return f"{_OPENING}=.{column}[0].{'value' if 'from' in self._row[column][0] else 'content'}"

    def _place_of_thought(self, name: str) -> str:
        fields = self._fields
        if self._writes_thoughts:
            return "reasoning" if "reasoning" in fields and name != thought_column(self._row, self._columns) else ""
        if self._config.format in _PAIRS:
            return _FIRST + self._existing(_PAIRS[self._config.format][1])
        return _TEMPLATE if "reasoning" in fields else ""

    def _existing(self, field: str) -> str:
        """Return the field, with the column that it reads in this row."""
        path = getattr(self._columns, field)
        found = optional(self._row, path) if field in self._fields else None
        return f"{field}={path}" if found else field


def is_judgement(found: Any) -> bool:
    """Return whether it is 0 or 1, as a table of text may write it as well."""
    return not isinstance(found, bool | list | dict) and found in _JUDGEMENTS


def _is_of_thread(row: Row, name: str, found: Any) -> bool:
    """Return whether a column places a text in a conversation: who speaks, and what it answers."""
    if name in _PARENTS:
        return "role" in row
    return name == "role" and str(found).lower() in (*SPEAKERS, "prompter")


def _keys_of_thread(row: Row) -> str:
    """Return the names of the columns with a message and with the one that it answers; empty if there are none."""
    names = [next((name for name in names if name in row), "") for names in (("message_id", "id"), _PARENTS)]
    return ",".join(names) if all(names) else ""


def _answer_path(name: str, found: Any) -> str:
    """Return the path of the text of an answer: a column, or every element of a list."""
    if isinstance(found, str) and found.strip() and (name != "target" or is_prose(found)):
        return name
    first = found[0] if isinstance(found, list) and found else found
    star = f"{name}.*" if first is not found else name
    if isinstance(first, str) and first is not found:
        return star
    key = next((key for key in _TEXT_KEYS if isinstance(first, dict) and isinstance(first.get(key), str)), "")
    return f"{star}.{key}" if key else ""


def _first_text(found: Any) -> str:
    first = found[0] if isinstance(found, list) else found
    return first if isinstance(first, str) else next(first[key] for key in _TEXT_KEYS if key in first)


def unread_problems(config: DatasetConfig, key: str, counts: "Counts") -> Iterator[str]:
    """Yield the reasons why a run stops at the columns that are not read of the source with this section."""
    fmt, missed, rows = config.format, counts.missed, counts.rows_kept + counts.rows_lost
    places = {
        name: place
        for name, place in counts.missed_places.items()
        if 2 * missed[name] > rows or place.startswith(_THREAD)
    }
    judging = [name for name in missed if has_role(name, *JUDGING) and missed[name] == counts.unread_columns.get(name)]
    without = command(fmt, _columns_of(fmt, config.columns), config, key, [*places, *judging])
    if places:
        counted = ", ".join(f"{name} ({missed[name]:,} of {rows:,} rows)" for name in places)
        why = "though the answers may need it"
        if fmt == "text":
            why = f"so {config.columns.text} alone would be trained"
        elif any(place in ("prompt", _TALK) for place in places.values()):
            why = "so the answers would be trained without their prompt"
        yield (
            f"not read, {why}: {counted}. To read it, {_how(config, key, places)}\n"
            f"    To train without it, type: {without}"
        )
    for name in judging:
        right = jq(f"select((.{name} | tonumber) == 1) | del(.{name})", config)
        yield (
            f"column {name!r} is 0 or 1 in {missed[name]:,} of {rows:,} rows, which judges the answers as wrong"
            " or right (preference data, as for KTO), and all of them would be learnt. Make rows of the right ones"
            f" alone: {right}\n    If it judges nothing, type: {without}"
        )


def _how(config: DatasetConfig, key: str, places: Mapping[str, str]) -> str:
    """Return what reads the columns: a command, or a program that makes other rows."""
    keys = next((place.partition("=")[2] for place in places.values() if place.startswith(_THREAD)), None)
    if keys is not None:
        return f"make a conversation of each answer: {_jq_of_thread(config, *keys.split(','))}" if keys else _MAKE_CHATS
    if all(place.startswith(_OPENING) for place in places.values()):
        opening = next(iter(places.values())).partition("=")[2]
        joined = " + ".join(f'"\\n\\n" + .{name}' for name in places)
        taken = ", ".join(f".{name}" for name in places)
        return f"type: {jq(f'{opening} += {joined} | del({taken})', config)}"
    reading = _reading(config.format, config.columns, places)
    if reading is None:
        return "write it into the texts that are read"
    template = f" model.chat_template={THOUGHT_TEMPLATE}" if _TEMPLATE in places.values() else ""
    return f"type: {command(*reading, config, key)}{template}"


_MAKE_CHATS = "make rows of messages, one for each conversation"


def _jq_of_thread(config: DatasetConfig, name: str, parent: str) -> str:
    """Return the commands that make a conversation of each answer in a table of messages, and train the answer."""
    speakers = ", ".join(f'"{speaker}"' for speaker, role in SPEAKERS.items() if role == "assistant")
    role = f'(if .role | IN({speakers}) then "assistant" elif .role == "system" then "system" else "user" end)'
    turns = f"[recurse($all[.{parent} | tostring] // empty)] | reverse | map({{role: {role}, content: .text}})"
    program = f"INDEX(.{name}) as $all | .[] | select(.role | IN({speakers})) | {{messages: ({turns})}}"
    checked = "python -m app.check data dataset=messages dataset.path=NEW.jsonl dataset.train_on=last"
    return f"{jq(program, config, of_all=True)} && {checked}"


def _reading(fmt: str, columns: Columns, places: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Return the format and columns that read the columns of `places` besides what `fmt` reads; None if none does."""
    if any(not place or place.startswith(_OPENING) for place in places.values()):
        return None
    if fmt == "text":
        return _reading_of_text(columns.text, places)
    read = _columns_of(fmt, columns)
    fields = dict.fromkeys(place.lstrip(_FIRST).partition("=")[0] for place in places.values() if place != _TEMPLATE)
    renamed = {_TALK: "prompt"}
    if fmt in _PAIRS and not fields.keys() <= {*fields_of(fmt)}:
        asks, answers = (getattr(columns, field) for field in _PAIRS[fmt])
        read |= {"instruction": asks, "output": answers}
        renamed |= dict(zip(_PAIRS[fmt], _PAIRS["instruction"], strict=True))
        fmt = "instruction"
    elif not fields.keys() <= {*fields_of(fmt)}:
        fmt = CHAT_OF.get(fmt, fmt)
    if places.get("history", "history") != "history":
        read["history"] = "null"
    read |= {renamed.get(field, field): _path(field, places) for field in fields}
    return fmt, {field: path for field, path in read.items() if field in fields_of(fmt)}


def _path(field: str, places: Mapping[str, str]) -> str:
    """Return the columns that a field reads now and those placed there, joined."""
    here = {name: place for name, place in places.items() if place.lstrip(_FIRST).partition("=")[0] == field}
    first = [name for name, place in here.items() if place.startswith(_FIRST)]
    last = [name for name in here if name not in first]
    existing = [path for place in here.values() if (path := place.partition("=")[2])][:1]
    return JOIN.join([*first, *existing, *last])


def _reading_of_text(text: str, places: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    asks = next((name for name, place in places.items() if place == "question"), "")
    answers = next((path for place in places.values() if (path := place.partition("=")[2])), "")
    if asks and answers:
        return "instruction", {"instruction": asks, "output": answers, "input": text}
    return "question_answer", {"question": asks or text, "answer": answers or text}


def _columns_of(fmt: str, columns: Columns) -> dict[str, str]:
    return {field: getattr(columns, field) or "null" for field in fields_of(fmt)}
