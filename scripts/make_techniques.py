"""python -m scripts.make_techniques: writes docs/techniques.md and docs/benchmarks/ladders.md.

python -m scripts.make_techniques NAME=FOLDER ...     first keeps the table of ladder NAME in docs/benchmarks/ladders/

FOLDER is the output_dir of `finetune train -m sweep=NAME`, or of `finetune check memory sweep=NAME hardware=...`.
"""

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from app.config.overrides import key_of
from app.config.validate import PROGRAMS, other_programs
from app.files import read_json, write_json, write_text
from app.pages.comparison_page import measured_tables, planned_tables
from app.pages.page import Page, as_markdown
from app.sweeps.search_space import read_preset
from app.tracking.formatting import NO_VALUE
from scripts.bench.machine import cpu_name

Row = Mapping[str, Any]
_DOCS = Path(__file__).resolve().parents[1] / "docs"
_LADDERS = _DOCS / "benchmarks" / "ladders"
_MAX_LINE_CHARACTERS = 120
_MEASURED, _PLANNED, _CLAIMED = "measured", "planned", "claimed"
_MADE = "Made by `python -m scripts.make_techniques`."
TECHNIQUES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("techniques.yaml").read_text())
ROWS: list[Row] = [*TECHNIQUES["methods"], *chain.from_iterable(TECHNIQUES["sections"].values())]


def typed(row: Row) -> str:
    """The command of a technique."""
    return (row.get("command") or f"finetune train {row['run']}").strip()


@cache
def table(name: str, kind: str) -> Mapping[str, Any]:
    """A table of ladder `name`: what its file claims, or what was kept, measured or planned."""
    if kind == _CLAIMED:
        rungs = read_preset([f"sweep={name}"]).config.rungs
        return {"rungs": [{"name": rung, **facts.claimed} for rung, facts in rungs.items()]}
    file = _LADDERS / f"{name}.{kind}.json"
    return read_json(file) if file.exists() else {"rungs": []}


def rungs_of(row: Row, kind: str) -> tuple[Row, Row]:
    """The rung that a technique is compared with, and its own; empty where there is no table."""
    name, _, own = row.get("rung", "").partition("/")
    rungs = {rung["name"]: rung for rung in (table(name, kind)["rungs"] if name else ())}
    return (rungs[row.get("over", next(iter(rungs)))], rungs[own]) if rungs else ({}, {})


def relative_speed(before: Row, after: Row) -> str:
    """The speed of a measured rung, as a multiple of another's."""
    base, own = (0 if rung.get("splits") else rung.get("tokens_per_second") or 0 for rung in (before, after))
    if before is not after and base and own:
        return f"{own / base:.2f} x `{before['name']}`"
    return "refused there" if after.get("status") == "refused" else NO_VALUE


def planned(row: Row) -> str:
    """What a GPU needs for the rung that a technique is compared with, and for its own."""
    needs = [f"{rung['needs'] / 1e9:.1f}" for rung in rungs_of(row, _PLANNED) if rung.get("needs")]
    return f"{' -> '.join(dict.fromkeys(needs))} GB" if len(needs) == 2 else NO_VALUE


def _claim(row: Row) -> str:
    before, after = rungs_of(row, _CLAIMED) if "claim" not in row else ({}, {})
    own = {key: value for key, value in after.items() if key != "name"}
    changes = (before if before is not after else {}).keys() & own.keys()
    texts = [f"{key} {before[key]} -> {own[key]}" if key in changes else f"{key}: {own[key]}" for key in own]
    return ": ".join(filter(None, (row.get("source"), row.get("claim", ", ".join(texts)))))


def _cells(row: Row) -> dict[str, str]:
    """Cells by head; a method has what its source says of speed and memory in place of a claim."""
    is_method = "method" in row
    settings = typed(row).removeprefix("finetune train").strip()
    return {
        "technique": row["method" if is_method else "technique"],
        **({f"{key}, *single GPU* says": row[key] for key in ("speed", "memory")} if is_method else {}),
        "source: its claim": "" if is_method else _claim(row),
        "settings": f"`{settings}`" if settings else "always on",
        "what it does": row.get("does", ""),
        _MEASURED: relative_speed(*rungs_of(row, _MEASURED)),
        _PLANNED: planned(row),
        "remark": "; ".join(filter(None, ("GPU" if "gpu" in row else "", row.get("note")))),
    }


def _answer(row: Row) -> dict[str, str]:
    """What the program answers to a name of another: what to type here, and the remark; or the row's own remark."""
    known = (each for each in other_programs() if any(row.get("name") in each.get(program, ()) for program in PROGRAMS))
    (found,) = [row] if "remark" in row else known
    answer = " ".join(filter(None, (f"`{found['here']}`." if "here" in found else "", found.get("remark"))))
    return {"technique": row["technique"], "typed": f"`{row['name']}`" if "name" in row else "", "answer": answer}


def _lines(rows: Sequence[Mapping[str, str]]) -> str:
    """A table; a column without values is left out."""
    head = [key for key in rows[0] if any(row[key] not in ("", NO_VALUE) for row in rows)]
    lines = (head, ["---"] * len(head), *([row[key] for key in head] for row in rows))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def techniques_page() -> str:
    """docs/techniques.md as text."""
    parts = ["# Techniques", _MADE, _lines([{"here": key, "is": text} for key, text in TECHNIQUES["about"].items()])]
    for name, rows in {"Methods": TECHNIQUES["methods"], **TECHNIQUES["sections"]}.items():
        parts += [f"## {name}", _lines([_cells(row) for row in rows])]
    parts += ["## Refused", "A name is answered where it is typed ([other programs](coming-from.md))."]
    return "\n\n".join([*parts, _lines([_answer(row) for row in TECHNIQUES["refused"]])]) + "\n"


def ladders_page() -> str:
    """docs/benchmarks/ladders.md as text."""
    parts = ["# Ladders", f"{_MADE} What a ladder is: [sweeps](../sweeps.md#ladders)."]
    for file in sorted(_LADDERS.glob("*.json")):
        name, kind, _ = file.name.split(".")
        ladder = table(name, kind)
        tables = measured_tables(ladder) if kind == _MEASURED else planned_tables(ladder)
        about = [f"    {ladder['command']}", f"{ladder['machine']}."] if kind == _MEASURED else []
        texts = [text.removeprefix("## ") for text in as_markdown(Page("", tables)).rstrip().split("\n\n")[1:]]
        texts = [text if text.startswith("|") else textwrap.fill(text, _MAX_LINE_CHARACTERS) for text in texts]
        parts += [f"## {name}, {kind}", *about, *texts]
    return "\n\n".join(parts) + "\n"


def kept(folder: Path) -> tuple[str, dict[str, Any]]:
    """Kind and table of the ladder in `folder`, without paths."""
    if (folder / "check.json").exists():
        plan = read_json(folder / "check.json")["ladder"]
        return _PLANNED, {key: plan[key] for key in ("label", "source", "rungs")}
    content, manifest = read_json(folder / "sweep.json"), read_json(min(folder.glob("*/manifest.json")))
    device = manifest["hardware"]["gpu"] or cpu_name()
    machine = f"{device}, threads: {manifest['choices']['threads']}; torch {manifest['packages']['torch']}"
    command = shlex.join(word for word in content["command"] if key_of(word) != "output_dir")
    return _MEASURED, {"command": command, "machine": machine, **content["ladder"]}


PAGES = {_DOCS / "techniques.md": techniques_page, _DOCS / "benchmarks" / "ladders.md": ladders_page}

if __name__ == "__main__":
    for ladder, _, place in (word.partition("=") for word in sys.argv[1:]):
        kind, found = kept(Path(place))
        write_json(_LADDERS / f"{ladder}.{kind}.json", found)
    for file, page in PAGES.items():
        write_text(file, page())
