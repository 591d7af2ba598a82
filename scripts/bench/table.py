"""Format measurements as Markdown tables, and compare them with goals.

python scripts/bench/table.py FILE.jsonl...                                     print the tables
python scripts/bench/table.py --into docs/benchmarks/cpu.md FILE.jsonl...

`--into` inserts them between the lines `<!-- measured -->` and `<!-- /measured -->` of a document.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

Line = dict[str, Any]
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
_SAME = (
    "model",
    "method",
    "device",
    "precision",
    "mix",
    "length",
    "tokens_per_step",
    "accumulation",
    "recompute",
    "settings",
)
_MORE = ("rank", "threads", "workload")
_GIB = 2**30


def main() -> None:
    """Print or insert the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, help="a document")
    options = parser.parse_args()
    lines = [json.loads(text) for file in options.files for text in file.read_text().splitlines()]
    text = "\n".join(report(lines))
    if options.into:
        options.into.write_text(put_into(options.into.read_text(), text))
    else:
        print(text)


def put_into(document: str, text: str) -> str:
    """Return the document with `text` between the marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the document needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def report(lines: list[Line]) -> list[str]:
    """Return the lines of all tables, then of failed measurements."""
    text = [row for group in groups(lines) for row in _training(group)]
    text += [row for rows in _by(lines, ("item",), "milliseconds").values() for row in _operations(rows)]
    text += [row for rows in _by(lines, ("item",), "forward_milliseconds").values() for row in _operations(rows)]
    failed = dict.fromkeys(f"- {_name(line)}: {line['error']}" for line in lines if "error" in line)
    return [*text, *(["Not measured:", "", *failed, ""] if failed else [])]


def groups(lines: Iterable[Line]) -> list[list[Line]]:
    """Return groups of training measurements with the same work and hardware."""
    return list(_by(lines, (*_SAME, *_MORE), "tokens_per_second").values())


def _by(lines: Iterable[Line], keys: tuple[str, ...], measured: str) -> dict[str, list[Line]]:
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if measured in line:
            same = json.dumps([line[key] for key in keys] + [line["hardware"]["name"]])
            groups.setdefault(same, []).append(line)
    return groups


def _name(line: Line) -> str:
    return " ".join(str(line[key]) for key in ("stage", "item", "framework", "model", "method", "name") if key in line)


def _contenders(group: list[Line]) -> dict[str, list[Line]]:
    by_name: dict[str, list[Line]] = {}
    for line in group:
        by_name.setdefault(line["framework"], []).append(line)
    return by_name


def rates(group: list[Line]) -> dict[str, float]:
    """Return the median of all rounds for each contender."""
    return {name: median(line["tokens_per_second"] for line in its) for name, its in _contenders(group).items()}


def ratios(group: list[Line]) -> dict[str, float]:
    """Return the speed of ours relative to each contender: the median over turns."""
    by_name = _contenders(group)
    return {
        name: median(_in_turns(by_name["ours"], its, "tokens_per_second"))
        for name, its in by_name.items()
        if "ours" in by_name
    }


def _in_turns(ours: list[Line], theirs: list[Line], key: str) -> list[float]:
    """Return the ratios by turn; turns that only one finished are ignored."""
    return [a[key] / b[key] for a, b in zip(ours, theirs, strict=False)]


def _training(group: list[Line]) -> list[str]:
    by_name, speeds, first = _contenders(group), rates(group), group[0]
    differences = furthest({name: its[0]["losses"] for name, its in by_name.items()})
    rows = [
        _contender_row(name, its, speeds, differences.get(name), by_name.get("ours", []))
        for name, its in by_name.items()
    ]
    worst = max(differences.values(), default=0.0)
    agree = "agree" if worst <= allowed_at(first["precision"]) else "**DO NOT AGREE**"
    return [
        f"### {_title(first)}",
        "",
        f"{_where(first)}. {len(by_name[first['framework']])} rounds of {first['steps']} steps; losses {agree}.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
        *rows,
        "",
        *(f"- {words}" for words in goals_for(first, speeds.get("ours"), ratios(group))),
        "",
    ]


def _title(line: Line) -> str:
    recompute = ", gradient checkpointing in all layers" if line["recompute"] else ""
    return f"{line['model']}, {line['method']}, {line['mix']}, {line['tokens_per_step']:,} tokens per step{recompute}"


def _where(line: Line) -> str:
    versions = line["versions"]
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "transformers", "peft", "trl") if name in versions
    )
    threads = f", threads: {line['threads']}" if line["device"] == "cpu" else ""
    return f"{line['hardware']['name']}{threads}, {line['precision']}; {packages}; commit {str(line['commit'])[:10]}"


_COLUMNS = (
    *("", "tokens/s", "lowest to highest", "ours is faster by", "by CPU time"),
    *("fill", "peak GiB", "estimated", "MFU", "first step", "losses differ"),
)


def _contender_row(
    name: str, its: list[Line], speeds: dict[str, float], difference: float | None, ours: list[Line]
) -> str:
    speed = [line["tokens_per_second"] for line in its]
    memory = max(line["peak_memory_bytes"] for line in its) / _GIB
    faster = by_cpu = ""
    if ours:
        faster = f"{median(_in_turns(ours, its, 'tokens_per_second')):.2f}"
    if ours and its[0]["device"] == "cpu":
        by_cpu = f"{1 / median(_in_turns(ours, its, 'cpu_seconds')):.2f}"
    share, planned = its[0]["mfu"], its[0].get("planned_memory_bytes")
    cells = [
        f"`{name}`",
        f"{speeds[name]:,.0f}",
        f"{min(speed):,.0f} to {max(speed):,.0f}",
        faster,
        by_cpu,
        f"{its[0]['fill']:.0%}",
        f"{memory:.2f}",
        "" if planned is None else f"{planned / _GIB:.2f}",
        "" if share is None else f"{share:.1%}",
        f"{median(line['first_step_seconds'] for line in its):.2f} s",
        "" if difference is None else f"{difference:.0e}",
    ]
    return f"| {' | '.join(cells)} |"


_ABOUT = {"stage", "item", "hardware", "versions", "commit", "dirty", "error"}


def _operations(rows: list[Line]) -> list[str]:
    """Return a table with a column per setting and result."""
    names = list(dict.fromkeys(name for row in rows for name in row if name not in _ABOUT))
    return [
        f"### {rows[0]['item']}, {rows[0]['hardware']['name']}",
        "",
        f"| {' | '.join(name.replace('_', ' ') for name in names)} |",
        f"|{'---|' * len(names)}",
        *(f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows),
        "",
    ]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = " x ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|")


# Losses of the first steps must agree, which shows that contenders did the same work.
COMPARED_STEPS = 10
MAX_DIFFERENCE = {"fp32": 1e-3}  # relative
MAX_DIFFERENCE_ELSE = 1e-2  # bf16

Losses = Sequence[float | None]


def allowed_at(precision: str) -> float:
    """Return the allowed relative difference of losses."""
    return MAX_DIFFERENCE.get(precision, MAX_DIFFERENCE_ELSE)


def furthest(losses: Mapping[str, Losses]) -> dict[str, float]:
    """Return the largest loss difference of each contender from the first one; infinite if a loss is not a number."""
    reference, *others = losses
    return {name: max(_differences(losses[reference], losses[name])) for name in others}


def _differences(ours: Losses, theirs: Losses) -> list[float]:
    pairs = list(zip(ours[:COMPARED_STEPS], theirs[:COMPARED_STEPS], strict=True))
    return [float("inf") if a is None or b is None else abs(a - b) / abs(a) for a, b in pairs]


Ratios = Mapping[str, float]  # speed of ours relative to each contender


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal: a factor relative to the contender `against`, or a speed; fields that are None match everything."""

    words: str
    at_least: float
    against: str | None = None
    device: str | None = None
    card: str | None = None
    model: str | None = None
    method: str | None = None
    tokens_per_step: int | None = None
    mix: str | None = None
    settings: tuple[str, ...] | None = None

    def fits(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the goal applies to a measurement."""
        names = ("device", "model", "method", "tokens_per_step", "mix")
        alike = all(getattr(self, name) in (None, facts[name]) for name in names)
        alike &= self.settings in (None, tuple(facts["settings"]))
        return alike and (self.card is None or self.card in facts["hardware"]["name"])

    def result(self, speed: float | None, ratios: Ratios) -> str | None:
        """Return a sentence with the result; None if it was not measured."""
        reached = ratios.get(self.against) if self.against else speed
        if reached is None:
            return None
        figure = f"{reached:.2f}" if self.against else f"{reached:,.0f}"
        return f"{self.words}: {figure}, {'met' if reached >= self.at_least else '**missed**'}"


def _on_h200(rate: float, model: str, method: str, settings: tuple[str, ...] | None = ()) -> Goal:
    words, tokens = f"at least {rate:,.0f} tokens/s", 16384
    return Goal(words, rate, card="H200", model=model, method=method, tokens_per_step=tokens, settings=settings)


GOALS = [
    Goal("at least 2.5 times TRL, packed", 2.5, "trl", device="cpu", model="tiny"),
    Goal("at least 1.8 times TRL, packed", 1.8, "trl", device="cpu", model="small"),
    Goal(
        "step time at most 1.05 times that of a bare loop (at least 0.95 times as fast)", 1 / 1.05, "bare", device="cpu"
    ),
    _on_h200(19e3, "llama_8b", "lora"),
    _on_h200(26e3, "llama_8b", "lora", ("quantization=fp8",)),
    _on_h200(18.5e3, "llama_8b", "qlora"),
    _on_h200(13.5e3, "llama_8b", "full"),
    _on_h200(95e3, "llama_1b", "lora"),
    _on_h200(1.7e3, "llama_70b", "qlora", None),
]


def goals_for(facts: Mapping[str, Any], speed: float | None, ratios: Ratios) -> list[str]:
    """Return the goals for these measurements, as met or missed; `speed` is that of ours."""
    return [words for goal in GOALS if goal.fits(facts) and (words := goal.result(speed, ratios)) is not None]


if __name__ == "__main__":
    main()
