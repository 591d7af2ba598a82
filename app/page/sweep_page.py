"""The page of a sweep: the best trial as a command, the ranking, and what the swept values did."""

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from app.page.curves import curves_of_several
from app.page.document import command, document, facts_table, note, section, table, tiles
from app.page.figures import NOTHING, duration, figure, quantity, whole
from app.page.html import Child, Html, element, joined
from app.page.kept import is_run, read_kept
from app.page.run_page import status_badge
from app.page.swept import heat_map, panels
from app.page.trials import KeptSweep, KeptTrial

_CURVES = 6  # of the best trials
_OPEN = ("pending", "running", "stopped")
_REPORT = "report.html"


def sweep_page(sweep: KeptSweep, target: Path) -> str:
    """`target` is where the page will lie: from there it leads to those of the trials."""
    name = sweep.folder.resolve().name
    return document(
        f"sweep {name}",
        element("div", element("h1", name), _state(sweep), class_="top"),
        element("p", str(sweep.folder), class_="soft small"),
        _notes(sweep),
        tiles(_tiles(sweep)),
        section("Best", _best(sweep)),
        section("What the values did", panels(sweep), heat_map(sweep)),
        section("Leaderboard", _leaderboard(sweep, target)),
        section(f"Curves of the best {_CURVES}, by step", _curves(sweep)),
        section("Failed", _failures(sweep)),
        section(
            "Again",
            element("p", "The same command goes on with what is left:"),
            command(shlex.join(sweep.command)),
        )
        if sweep.command
        else None,
    )


def _state(sweep: KeptSweep) -> Html:
    """The first of these that any trial is in."""
    statuses = {trial.status for trial in sweep.trials}
    order = ("running", "stopped", "pending", "finished", "dry_run", "failed")
    return status_badge(next((each for each in order if each in statuses), "pending"))


def _notes(sweep: KeptSweep) -> Iterator[Html]:
    counts = Counter(trial.status for trial in sweep.trials)
    if not sweep.trials:
        yield note("warn", "No trial has begun.")
    if counts["failed"]:
        yield note(
            "bad", f"{counts['failed']} of {len(sweep.trials)} trials failed; their errors stand below."
        )
    left = sum(counts[each] for each in _OPEN)
    if left:
        yield note("warn", f"{left} of {len(sweep.trials)} trials are not done: the ranking may change.")


def _tiles(sweep: KeptSweep) -> Iterator[tuple[str, str | None]]:
    known = [trial.objective for trial in sweep.ranked() if trial.objective is not None]
    done = sum(trial.status == "finished" for trial in sweep.trials)
    yield "best objective", figure(known[0]) if known else None
    yield "worst objective", figure(known[-1]) if len(known) > 1 else None
    yield f"finished of {len(sweep.trials)} trials", str(done)
    yield "time of all trials", duration(sum(trial.seconds or 0 for trial in sweep.trials))


def _best(sweep: KeptSweep) -> Child:
    winner = sweep.best()
    if winner is None:
        return None
    return joined(
        element("p", f"Trial {winner.number} with objective {figure(winner.objective or 0)}:"),
        facts_table((key, element("code", value)) for key, value in winner.values.items()),
        command(shlex.join(["python", "-m", "app.train", *winner.overrides])),
        element("p", f"It lies in {winner.folder}.", class_="remark"),
    )


def _leaderboard(sweep: KeptSweep, target: Path) -> Child:
    if not sweep.trials:
        return None
    head = ("rank", "trial", "objective", *sweep.keys, "steps", "tokens/s", "time", "status")
    first = 3 + len(sweep.keys)
    rows = [_row(rank, trial, sweep, target) for rank, trial in enumerate(sweep.ranked(), 1)]
    return table(head, rows, numbers=(2, first, first + 1, first + 2))


def _row(rank: int, trial: KeptTrial, sweep: KeptSweep, target: Path) -> tuple[Child, ...]:
    speed, seconds = trial.tokens_per_second, trial.seconds
    return (
        str(rank) if trial.objective is not None else NOTHING,
        _link(trial, target),
        NOTHING if trial.objective is None else figure(trial.objective),
        *(element("code", trial.values.get(key, "")) for key in sweep.keys),
        whole(trial.steps) or NOTHING,
        NOTHING if speed is None else quantity(speed),
        duration(seconds) if seconds else NOTHING,
        status_badge(trial.status),
    )


def _link(trial: KeptTrial, target: Path) -> Child:
    """To the page of the trial, if there is one beside this page."""
    page = trial.folder / _REPORT
    if target.parent.resolve() != trial.folder.parent.resolve() or not page.is_file():
        return str(trial.number)
    return element("a", str(trial.number), href=f"./{quote(trial.folder.name)}/{_REPORT}")


def _curves(sweep: KeptSweep) -> Child:
    best = [trial for trial in sweep.ranked() if is_run(trial.folder)][:_CURVES]
    return curves_of_several([(_told(trial), read_kept(trial.folder)) for trial in best])


def _told(trial: KeptTrial) -> str:
    return f"{trial.number}: {' '.join(f'{key}={value}' for key, value in trial.values.items())}"


def _failures(sweep: KeptSweep) -> Child:
    return [
        joined(element("h3", _told(trial)), element("pre", trial.error or "It left no reason."))
        for trial in sweep.trials
        if trial.status == "failed"
    ]
