"""What app.report takes: whose page, and where it goes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.config.command import parse_command


@dataclass(kw_only=True, slots=True)
class ReportConfig:
    """One of the first three; `to` is the file to write, the usual place unless given."""

    run: str | None = None
    sweep: str | None = None
    runs: str | None = None
    to: str | None = None

    @property
    def given(self) -> list[tuple[str, Path]]:
        """The folders, each with how it was named."""
        named = [("run", self.run), ("sweep", self.sweep)]
        single = [(f"{key}={text}", Path(text).expanduser()) for key, text in named if text is not None]
        several = [] if self.runs is None else folders_in(self.runs)
        return [*single, *((f"runs={text}", Path(text).expanduser()) for text in several)]

    @property
    def target(self) -> Path:
        """The file; beside what it is about, or here where it is about several."""
        if self.to is not None:
            return Path(self.to).expanduser()
        return Path("comparison.html") if self.runs is not None else self.given[0][1] / "report.html"


def report_config(arguments: Sequence[str]) -> ReportConfig:
    """From the command line, with everything that is wrong with it."""
    return parse_command(arguments, ReportConfig, _problems)


def folders_in(text: str) -> list[str]:
    """Separated by commas; a comma may belong to a name, as in the folders of a sweep's trials: the longest names that
    exist are taken.
    """
    parts = text.split(",")
    found = []
    while parts:
        lengths = range(len(parts), 0, -1)
        size = next((n for n in lengths if Path(",".join(parts[:n])).expanduser().is_dir()), 1)
        found.append(",".join(parts[:size]))
        parts = parts[size:]
    return [each for each in found if each]


def _problems(config: ReportConfig) -> Iterator[str]:
    named = {"run": config.run, "sweep": config.sweep, "runs": config.runs}
    given = {key: text for key, text in named.items() if text is not None}
    if not given:
        yield "run has no value. Give run=DIR, sweep=DIR or runs=DIR1,DIR2."
    if len(given) > 1:
        shown = " and ".join(f"{key}={text}" for key, text in given.items())
        yield f"{shown} each say whose page it is. Keep one."
    if config.runs and len(folders_in(config.runs)) < 2:
        yield f"runs={config.runs}: a comparison needs two folders at least. For the page of one run give run=DIR."
