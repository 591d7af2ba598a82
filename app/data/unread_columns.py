"""Columns that are not read although answers need what they say, or are judged by them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.config.dataset_schema import Columns, DatasetConfig
from app.config.row_formats import WITHOUT_ANSWERS
from app.data.columns import command, is_history
from app.data.formats import fields_of
from app.data.roles import INPUTS, has_role, is_prose
from app.data.types import RenderedText

if TYPE_CHECKING:
    from app.data.data_report import Counts

_JUDGEMENTS = (0, 1, "0", "1", "0.0", "1.0")
_PAIRS = {
    "instruction": ("instruction", "output"),
    "question_answer": ("question", "answer"),
    "prompt_completion": ("prompt", "completion"),
}


def is_missed(config: DatasetConfig, name: str, found: Any, samples: Sequence[RenderedText]) -> bool:
    """Whether an unread column says what no sample does: a text, earlier turns, or 0 or 1 as a judgement."""
    if name in fields_of(config.format) and getattr(config.columns, name) != name:
        return False  # null, or another column in its place, on purpose
    if has_role(name, "label"):
        return config.format not in WITHOUT_ANSWERS and not isinstance(found, bool) and found in _JUDGEMENTS
    if name == "history" and is_history(found):
        return True
    if not is_prose(found, name):
        return False
    words = " ".join(found.split())
    return not any(found.strip() in each.text or words in " ".join(each.text.split()) for each in samples)


def unread_problems(config: DatasetConfig, key: str, counts: "Counts") -> Iterator[str]:
    """Reasons why a run stops at the columns that are not read of the source with this section."""
    fmt, missed, rows = config.format, counts.missed, counts.rows_kept + counts.rows_lost
    columns = _columns_of(fmt, config.columns)
    inputs = [name for name, number in missed.items() if has_role(name, *INPUTS) and 2 * number > rows]
    if inputs and fmt not in WITHOUT_ANSWERS:
        places = {name: "input" if counts.missed_chars[name] and name != "system" else name for name in inputs}
        reading = _with_inputs(fmt, config.columns, places)
        how = f"type: {command(*reading, config, key)}" if reading else "join them into one column"
        counted = ", ".join(f"{name} ({missed[name]:,} of {rows:,} rows)" for name in inputs)
        yield (
            f"not read, though the answers may need it: {counted}. To read it, {how}\n"
            f"    To train without it, type: {command(fmt, columns, config, key, inputs)}"
        )
    for name, number in missed.items():
        if has_role(name, "label") and number == counts.unread_columns.get(name):
            right = f"jq -c 'select((.{name} | tonumber) == 1) | del(.{name})' OLD.jsonl > NEW.jsonl"
            yield (
                f"column {name!r} is 0 or 1 in {number:,} of {rows:,} rows, which judges the answers as wrong"
                " or right (preference data, as for KTO), and all of them would be learnt. Make rows of the right ones"
                f" alone: {right}\n    If it judges nothing, type: {command(fmt, columns, config, key, [name])}"
            )


def _with_inputs(fmt: str, columns: Columns, places: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """The format and columns that read the columns of `places`, each in its field of `instruction`, besides what `fmt`
    reads; None where two need one place.
    """
    read, names, fields = _columns_of(fmt, columns), list(places), list(places.values())
    if fmt in _PAIRS:
        asks, answers = (getattr(columns, field) for field in _PAIRS[fmt])
        read |= {"instruction": asks, "output": answers, **({"history": "null"} if "history" in names else {})}
        fmt = "instruction"
    else:
        fields = ["system"] * len(names)
    if len({*fields}) < len(names):
        return None
    read |= dict(zip(fields, names, strict=True))
    return fmt, {field: path for field, path in read.items() if field in fields_of(fmt)}


def _columns_of(fmt: str, columns: Columns) -> dict[str, str]:
    return {field: getattr(columns, field) or "null" for field in fields_of(fmt)}
