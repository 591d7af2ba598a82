"""Fuzz tests: random input must be accepted or rejected with an error message.

python -m scripts.fuzz [NAME [SEED]]

`overrides`: command lines, composed and checked; `files`: rows of all formats and damaged files, detected and read;
`preparations`: rows under random settings, tokenized; `received`: run folders with one edited file, read by commands.
A crash is any exception except AppError, a wrong count, or a timeout. Crashes are printed with their seed;
`python -m scripts.fuzz NAME SEED` repeats one. Exit code 1 if there were any.
"""

import csv
import gzip
import io
import json
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from app.config.arguments import split_arguments
from app.config.conf_files import choices_by_group
from app.config.dataset import formats_for
from app.config.kinds import ROW_FORMATS, fields_of
from app.config.load import compose_run
from app.config.schema import Columns, DatasetConfig
from app.errors import AppError
from scripts.received_folders import fuzz_received

_MAX_CASE_SECONDS = 30


@dataclass(slots=True)
class Figures:
    """Outcomes and crashes of one fuzzer."""

    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: list[tuple[int, str]] = field(default_factory=list)  # seed and traceback


class _TooLongError(Exception):
    pass


def run(name: str, seeds: Iterable[int]) -> Figures:
    """Run one fuzzer in this process, one case per seed."""
    figures = Figures()
    old = signal.signal(signal.SIGALRM, _too_long)
    for seed in seeds:
        signal.alarm(_MAX_CASE_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            try:
                FUZZERS[name][1](Random(seed), Path(folder))
                figures.outcomes["accepted"] += 1
            except AppError as refusal:
                figures.outcomes["refused"] += 1
                is_printable = all(line.isprintable() for line in refusal.report().splitlines())
                if name != "overrides" and not is_printable:  # messages may repeat typed characters
                    figures.crashes.append((seed, f"not printable: {refusal.report()!r}"))
            except Exception:  # noqa: BLE001 (the fuzzer looks for any crash)
                figures.crashes.append((seed, traceback.format_exc(limit=-8)))
            finally:
                signal.alarm(0)
    signal.signal(signal.SIGALRM, old)
    return figures


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLongError(f"a case took more than {_MAX_CASE_SECONDS} s")


# ---- command lines

_WORDS = (
    *("", "null", "true", "0", "-1", "1e999", "nan", "1.5", "auto", "none", "'", '"', "\\", "a b", "é\u202e\udce9"),
    *("[]", "{}", "[a,b]", "{a:1}", "[" * 12 + "]" * 12, "[" * 300, "${seed}", "${oc.env:HOME}", "${nothing}", "${"),
    *(
        "a,b",
        "range(1,3)",
        "choice(a,b)",
        "glob(*)",
        "asset:tiny",
        "/dev/null",
        "~",
        "+",
        "=",
        "--cfg",
        "-m",
        "9" * 5000,
    ),
)


@cache
def _keys() -> tuple[str, ...]:
    def walk(section: Any, prefix: str) -> Iterator[str]:
        for entry in fields(section):
            value = getattr(section, entry.name, None)
            yield f"{prefix}{entry.name}"
            if is_dataclass(value):
                yield from walk(value, f"{prefix}{entry.name}.")

    return tuple(walk(compose_run([]), ""))


@cache
def _choices() -> tuple[tuple[str, str], ...]:
    return tuple((group, choice) for group, names in choices_by_group().items() for choice in names)


def fuzz_overrides(random: Random, _folder: Path) -> None:
    """Check a random command line."""
    compose_run(split_arguments([_word(random) for _ in range(random.choice((1, 1, 2, 4, 8)))])[0])


def _word(random: Random) -> str:
    if random.random() < 0.3:
        return "=".join(random.choice(_choices()))
    key = random.choice(_keys())
    if random.random() < 0.2:
        key = _edited(random, key)
    word = f"{key}={random.choice((*_WORDS, str(random.randrange(-3, 5000)), random.choice(_choices())[1]))}"
    if random.random() < 0.3:
        word = random.choice(("+", "++", "~", "-", "--", "@", "")) + word
    return _edited(random, word) if random.random() < 0.2 else word


def _edited(random: Random, text: str) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + random.choice(_WORDS) + text[at + random.randrange(3) :]


# ---- rows and files

_TEXTS = (
    *("", " ", "a", "Hi there", "x\0y", "\ud800", "\u2028", "<image>", "<|im_end|>", "<think>a</think>b", "{{ 1 }}"),
    *("word " * 400, "\r", "\n\n", "é" * 30, '{"name": "f", "arguments": {}}', "[1", "0.5", "true", "</s>", "\x1b[31m"),
)
_ROLES = ("user", "assistant", "system", "tool", "developer", "function", "human", "gpt", "nobody", "function_call", "")
_OTHER_COLUMNS = (
    *("id", "label", "labels", "chosen", "rejected", "images", "instances", "meta", "response", "context", "functions"),
    *("a.b", "*", "\ud800", "", "instances.0.output", "chat_template_kwargs", "kto_tag", "preferred_output"),
)


def _value(random: Random, depth: int = 0) -> Any:
    """Return a random JSON value."""
    kind = random.randrange(9 if depth < 3 else 6)
    if kind < 3:
        return random.choice(_TEXTS)
    if kind < 6:
        return random.choice((None, True, False, 0, 1, -7, 0.5, float("nan"), 10**30))
    if kind == 6:
        return [_value(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 7:
        return [_message(random, depth) for _ in range(random.randrange(5))]
    return {random.choice(("a", "role", "content", "name", "function", "*")): _value(random, depth + 1)}


def _message(random: Random, depth: int = 0) -> Any:
    if random.random() < 0.05:
        return _value(random, depth + 1)
    speaker, text = random.choice((("role", "content"), ("role", "content"), ("from", "value")))
    message = {speaker: random.choice(_ROLES[: random.choice((2, 6, 11))]), text: random.choice(_TEXTS)}
    for key in ("tool_calls", "function_call", "train", "weight", "training", "thinking", "name", text):
        if random.random() < 0.06:
            message[key] = _value(random, depth + 1)
    return message


def _conversation(random: Random, speaker: str, text: str, names: tuple[str, str]) -> list[dict[str, Any]]:
    turns = [{speaker: names[at % 2], text: random.choice(_TEXTS[2:4])} for at in range(random.choice((2, 4)))]
    return turns if random.random() < 0.9 else [*turns, _message(random)]


def _row(random: Random, fmt: str) -> dict[str, Any]:
    """Return a row of the format, usually valid."""
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "messages": lambda: {"messages": _conversation(random, "role", "content", ("user", "assistant"))},
        "sharegpt": lambda: {"conversations": _conversation(random, "from", "value", ("human", "gpt"))},
        "chat_completion": lambda: {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": _conversation(random, "role", "content", ("assistant", "user")),
        },
        "tagged_words": lambda: {
            "tokens": random.choice(_TEXTS).split(),
            "tags": random.choices(("O", "B-PER", 3), k=random.choice((1, 2, 3))),
        },
    }
    names = {
        "instruction": ("instruction", "input", "output"),
        "question_answer": ("question", "answer"),
        "prompt_completion": ("prompt", "completion"),
        "labelled_text": ("text", "label"),
        "text_pair": ("sentence1", "sentence2", "label"),
    }.get(fmt, ("text",))
    row = makers[fmt]() if fmt in makers else {name: random.choice(_TEXTS) for name in names}
    for _ in range(random.choice((0, 0, 0, 1, 3))):
        name = random.choice((*row, *_OTHER_COLUMNS, *(column.name for column in fields(Columns))))
        row[name] = _value(random)
    return row


_FORMATS = tuple(ROW_FORMATS)


def _rows(random: Random, fmt: str) -> list[dict[str, Any]]:
    return [
        _row(random, fmt if random.random() < 0.95 else random.choice(_FORMATS)) for _ in range(random.randrange(9))
    ]


def _file(random: Random, folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the rows to a file of a random type, sometimes compressed or damaged."""
    kind = random.choice(("jsonl", "jsonl", "jsonl", "json", "csv", "tsv", "txt", "parquet", "feather"))
    raw = _bytes_of(rows, kind)
    if random.random() < 0.3:
        for _ in range(random.randrange(1, 6)):
            at = random.randrange(len(raw) + 1)
            extra = random.choice((b"", b"\0", b"\xff", b'"', b"\n", b"\r", b"{", b"]", b",", random.randbytes(3)))
            raw = raw[:at] + extra + raw[at + random.choice((0, 1, 9)) :]
    if random.random() < 0.1:
        raw, kind = gzip.compress(raw), f"{kind}.gz"
        raw = raw[: random.choice((len(raw), len(raw) - 3))]
    path = folder / f"rows.{kind}"
    path.write_bytes(raw)
    return path


def _bytes_of(rows: list[dict[str, Any]], kind: str) -> bytes:
    if kind == "jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if kind == "json":
        return json.dumps(rows).encode()
    if kind == "txt":
        return json.dumps(rows, ensure_ascii=False).encode(errors="surrogatepass")
    if kind in ("csv", "tsv"):
        text = io.StringIO()
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(text, names, delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode(errors="surrogatepass")
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    try:
        table = pyarrow.Table.from_pylist(rows)
        if kind == "parquet":
            pyarrow.parquet.write_table(table, sink)
        else:
            with pyarrow.ipc.new_file(sink, table.schema) as writer_of_arrow:
                writer_of_arrow.write_table(table)
    except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError):  # rows that no table can store
        return b"PAR1"
    return bytes(sink.getvalue().to_pybytes())


@cache
def _policy() -> DatasetConfig:
    return compose_run([]).dataset


def _settings(random: Random, path: Path, fmt: str) -> DatasetConfig:
    """Return random valid settings."""
    columns = replace(_policy().columns)
    if random.random() < 0.1:
        columns.output = random.choice(("answer", "instances.*.output", "a.b", "completion"))
    if random.random() < 0.1:
        columns.system = None
    return replace(
        _policy(),
        path=str(path),
        format=fmt,
        columns=columns,
        eval_path=None,
        leave_out=random.choice(([], [], ["rejected", "images"])),
        max_length=random.choice((2, 16, 64, 256)),
        train_on=random.choice(ROW_FORMATS[fmt].train_on),
        on_overflow=random.choice(("auto", "drop", "truncate", "error")),
        on_bad_row=random.choice(("skip", "skip", "error")),
        on_unstable_template=random.choice(("expand", "join", "last", "error")),
        deduplicate=random.random() < 0.3,
        max_rows=random.choice((None, None, 3)),
        eval_fraction=random.choice((0.0, 0.0, 0.3)),
    )


def fuzz_files(random: Random, folder: Path) -> None:
    """Recognize the format of a random file, and read all of its rows."""
    from app.data.columns import reshape_rows, unread
    from app.data.detect_format import detect_formats
    from app.data.formats import empty_parts, read_row
    from app.data.rows import Broken, RowProblem
    from app.data.sources import train_source

    fmt = random.choice(_FORMATS)
    task = "classification" if "label" in fmt or "pair" in fmt else "tokens" if "tag" in fmt else "causal"
    path = _file(random, folder, _rows(random, fmt))
    config = replace(_settings(random, path, fmt), format=random.choice(("auto", "auto", fmt)))
    config, _ = detect_formats(config, formats_for(task))
    for _, row in reshape_rows(train_source(config).rows(), config, fields_of(config.format)):
        if isinstance(row, Broken):
            continue
        try:
            content = read_row(row, config.format, config.columns)
        except RowProblem:
            continue
        list(empty_parts(row, content, config.format, config.columns))
        list(unread(row, {"messages", "a.b"}))


@cache
def _tokenizer(template: str | None) -> Any:
    from app.base.tokenizer import load_tokenizer

    return load_tokenizer(replace(compose_run([]).model, chat_template=template), needs_template=True)


def fuzz_preparations(random: Random, folder: Path) -> None:
    """Prepare random rows under random settings; the counts must agree with the tokens."""
    from app.assets import template_names
    from app.data.prepare import prepare

    fmt = random.choice(_FORMATS)
    path = folder / "rows.jsonl"
    path.write_bytes(_bytes_of(_rows(random, fmt) * random.choice((1, 1, 7)), "jsonl"))
    config = _settings(random, path, fmt)
    template = random.choice((None, *template_names()))
    data = prepare(config, _tokenizer(template), str(folder / "cache"))
    counts = data.report.train
    assert counts.rows_read == counts.rows_kept + counts.bad_rows + counts.rows_lost, counts
    assert counts.over_long == counts.dropped + counts.truncated + counts.split, counts
    assert counts.samples == len(data.train), counts
    for rows in (data.train, data.eval):
        for i in range(0 if rows is None else len(rows)):
            assert rows is not None
            assert 0 < len(rows.ids(i)) <= config.max_length
            assert data.classes or rows.loss_mask(i).any()


# number of cases of a full run, and the function of a case
FUZZERS: dict[str, tuple[int, Callable[[Random, Path], None]]] = {
    "overrides": (2000, fuzz_overrides),
    "files": (2500, fuzz_files),
    "preparations": (600, fuzz_preparations),
    "received": (2000, fuzz_received),
}


def main(arguments: list[str]) -> int:
    """Run the fuzzers in the arguments, and print counts and crashes."""
    crashed = False
    for name in arguments[:1] or FUZZERS:
        seeds = [int(seed) for seed in arguments[1:]] or range(FUZZERS[name][0])
        begin = time.monotonic()
        figures = run(name, seeds)
        shown = ", ".join(f"{number:,} {outcome}" for outcome, number in sorted(figures.outcomes.items()))
        seconds = time.monotonic() - begin
        print(f"{name}: {len(seeds):,} cases, {shown}, {len(figures.crashes)} crashes, {seconds:.0f} s", flush=True)
        for seed, crash in figures.crashes:
            print(f"python -m scripts.fuzz {name} {seed}\n{crash}")
        crashed = crashed or bool(figures.crashes)
    return int(crashed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
