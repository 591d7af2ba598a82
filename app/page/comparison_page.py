"""Runs beside each other: curves, results, settings that differ, what else differs, and their answers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.page.answers import Answer, asked, box, is_right, moment
from app.page.curves import curves_of_several
from app.page.document import document, folded, note, section, table
from app.page.figures import NOTHING, duration, figure, memory, number, quantity, whole
from app.page.html import Child, Html, element, joined
from app.page.kept import KeptRun, read_kept, section_of
from app.page.run_page import status_badge, what_it_is
from app.record.comparison import LineComparison, of_content, of_lines, of_programs

_OF_A_START = ("output_dir", "resume")  # every run has its own
_MOST_ANSWERS = 12
_FORMS = (
    ("objective", "objective", figure, min),
    ("training loss, last", "train_loss_last", figure, min),
    ("held-out loss, last", "eval_loss", figure, min),
    ("steps", "steps", lambda steps: whole(steps) or "", None),
    ("tokens a second", "tokens_per_second", quantity, max),
    ("peak memory", "peak_memory_bytes", memory, min),
)


def comparison_page(folders: Sequence[Path]) -> str:
    """From what lies in folders that have runs."""
    runs = [read_kept(folder) for folder in folders]
    names = told_apart(folders)
    return document(
        f"{len(runs)} runs: {', '.join(names)}",
        element("h1", f"{len(runs)} runs beside each other"),
        [
            note("warn", f"{name}: {remark}")
            for name, run in zip(names, runs, strict=True)
            for remark in run.remarks
        ],
        section("Results", _results(names, runs)),
        section("Curves, by step", curves_of_several(list(zip(names, runs, strict=True)))),
        section("Settings that differ", _settings(names, runs)),
        section("Lines, program and data", _origins(names, runs)),
        section("Last answers on held-out rows", _answers(names, runs)),
    )


def told_apart(folders: Sequence[Path]) -> list[str]:
    """Their names, with as much of the folders above as it takes."""
    whole_paths = [folder.resolve() for folder in folders]
    most = max(len(path.parts) for path in whole_paths)
    for depth in range(1, most + 1):
        names = ["/".join(path.parts[-depth:]) for path in whole_paths]
        if len(set(names)) == len(names):
            return names
    return [f"{at}: {path.name}" for at, path in enumerate(whole_paths, 1)]


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """`optimizer.lr` and its value as text."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", "null" if value is None else str(value)


def _results(names: Sequence[str], runs: Sequence[KeptRun]) -> Html:
    rows: list[tuple[Child, ...]] = [
        ("what", *(element("span", what_it_is(run), class_="small") for run in runs)),
        ("status", *(status_badge(run.status) for run in runs)),
    ]
    for name, key, words, better in _FORMS:
        known = [number(run.result.get(key)) for run in runs]
        there = [each for each in known if each is not None]
        best = better(there) if better and len(set(there)) > 1 else None
        if there:
            rows.append((name, *(_marked(each, words, best) for each in known)))
    rows.append(("time", *(NOTHING if (s := run.seconds()) is None else duration(s) for run in runs)))
    return table(("", *names), rows)


def _marked(value: float | None, words: Any, best: float | None) -> Child:
    if value is None:
        return NOTHING
    told = words(value)
    return element("b", told, element("span", " ✓", class_="tick")) if value == best else str(told)


def _settings(names: Sequence[str], runs: Sequence[KeptRun]) -> Child:
    """Every key in which not all are the same."""
    settings = [dict(flat(run.settings)) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if key not in _OF_A_START]
    rows = [
        (element("code", key), *(element("code", each.get(key, NOTHING)) for each in settings))
        for key in keys
        if len({each.get(key) for each in settings}) > 1
    ]
    return table(("", *names), rows) if rows else element("p", "None: every key has the same value.")


def _origins(names: Sequence[str], runs: Sequence[KeptRun]) -> Child:
    """Each further run against the first."""
    parts: list[Child] = []
    for name, run in zip(names[1:], runs[1:], strict=True):
        lines = of_lines(runs[0].lines, run.lines)
        then, now = _shaped(runs[0].manifest), _shaped(run.manifest)
        differences = [*of_programs(then, now), *of_content(then, now)]
        rows = [(each.name, each.then, each.now) for each in differences]
        parts.append(element("h3", f"{name} against {names[0]}"))
        parts.append(element("p", _line_words(lines)))
        same = element("p", "Versions, commit, hardware, rows, tokenizer and base are the same.")
        parts.append(table(("", names[0], name), rows) if rows else same)
    return joined(parts)


def _shaped(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """With every part that is compared, whatever the file lacks."""
    parts = {name: section_of(manifest, name) for name in ("packages", "hardware", "hashes")}
    program = {**section_of(manifest, "program"), "git": section_of(manifest, "program", "git")}
    return {"python": manifest.get("python"), "program": program, **parts}


def _line_words(lines: LineComparison) -> str:
    if not lines.lines:
        return "No line of both is of the same step."
    if lines.first is None or lines.largest is None:
        return f"The same numbers to the last bit, {lines.lines:,} lines up to step {lines.last_step:,}."
    return (
        f"Of {lines.lines:,} lines up to step {lines.last_step:,} the first that differs is of step "
        f"{lines.first.step:,} ({lines.first.name}); the largest difference is {lines.largest.relative:.1e} of "
        f"{lines.largest.name} at step {lines.largest.step:,}."
    )


def _answers(names: Sequence[str], runs: Sequence[KeptRun]) -> Child:
    """Prompts that the last answers of at least two runs have in common."""
    last = [_last_answers(run) for run in runs]
    prompts = [
        key
        for key in dict.fromkeys(key for each in last for key in each)
        if sum(key in each for each in last) > 1
    ]
    if not prompts:
        return None
    shown = [_sample(key, names, runs, last) for key in prompts[:_MOST_ANSWERS]]
    return joined(shown[:4], folded(f"{len(shown) - 4} more", shown[4:]) if len(shown) > 4 else None)


def _last_answers(run: KeptRun) -> dict[tuple[str, str], Answer]:
    last = max((line["step"] for line in run.samples), default=None)
    return {
        (str(line.get("prompt", "")), str(line.get("expected", ""))): Answer.of(line)
        for line in run.samples
        if line["step"] == last
    }


def _sample(
    key: tuple[str, str],
    names: Sequence[str],
    runs: Sequence[KeptRun],
    last: Sequence[Mapping[tuple[str, str], Answer]],
) -> Html:
    prompt, expected = key
    boxes = [box("expected", expected, None)]
    for name, run, found in zip(names, runs, last, strict=True):
        if key in found:
            step = max(line["step"] for line in run.samples)
            boxes.append(box(f"{name}, {moment(step)}", found[key].shown, is_right(found[key], expected)))
    return asked(prompt, boxes)
