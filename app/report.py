"""Command app.report: an HTML page about a run, a sweep, or several runs, in one file that needs nothing else.

python -m app.report run=runs/mine                    runs/mine/report.html, as each run writes it at its end
python -m app.report sweep=runs/sweep-lr-d45e4692     the leaderboard, and what the swept values did
python -m app.report runs=runs/a,runs/b to=a-b.html   curves over each other, and what differs
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.config.command_line import command_help
from app.config.commands import REPORT, ReportConfig, run_command
from app.errors import CheckpointError, refuse
from app.files import write_text
from app.pages.read_run import is_run, read_sweep
from app.tracking.console import Console, open_console

if TYPE_CHECKING:
    from app.pages.page import Page

# pages are imported inside functions, so that a mistake in the command line is reported without loading YAML and jinja2

_SWEEP = "sweep.json"


def report(config: ReportConfig, console: Console) -> None:
    """Write the page."""
    refuse([*_folder_problems(config), *_target_problems(config)])
    from app.pages.page import PAGE_FAULTS, as_html

    try:
        page = as_html(_page(config))
    except PAGE_FAULTS as fault:
        given = " ".join(name for name, _ in config.given)
        raise CheckpointError(
            f"{given}: one of its files is not as runs write it ({type(fault).__name__}: {fault}). Take a copy of the "
            "folder, or move manifest.json, preview.json or samples.jsonl away: a page is made without them."
        ) from fault
    write_text(config.target, page)
    console.say(f"report  {config.target}")


def _page(config: ReportConfig) -> "Page":
    folders = [folder for _, folder in config.given]
    if config.run is not None:
        from app.pages.run_page import run_page

        return run_page(folders[0])
    if config.runs is not None:
        from app.pages.comparison_page import comparison_page

        return comparison_page(folders)
    from app.pages.comparison_page import sweep_page

    content = read_sweep(folders[0])
    assert content is not None, "checked before"
    return sweep_page(folders[0], content, config.target)


def _folder_problems(config: ReportConfig) -> Iterator[str]:
    for named, folder in config.given:
        is_sweep = (folder / _SWEEP).is_file()
        if not folder.is_dir():
            yield f"{named}: there is no such folder. Give the output_dir of a run or a sweep."
        elif config.sweep is None and not is_run(folder):
            instead = f"Give sweep={folder}" if is_sweep else "Give the output_dir of a run"
            yield f"{named}: there is no run in it. {instead}."
        elif config.sweep is not None and not is_sweep:
            instead = f"Give run={folder}" if is_run(folder) else "Give the output_dir of a sweep"
            yield f"{named}: there is no {_SWEEP} in it. {instead}."
        elif config.sweep is not None and read_sweep(folder) is None:
            yield f"{named}: its {_SWEEP} cannot be read. Start the command of the sweep again: it is written anew."


def _target_problems(config: ReportConfig) -> Iterator[str]:
    target = config.target
    if target.is_dir():
        yield f"to={target}: this is a folder. Give a file in it, such as to={target / 'report.html'}."
    elif config.to is not None and not target.parent.is_dir():
        yield f"to={target}: there is no folder {target.parent}. Make it, or give another file."
    elif target.parent.is_dir() and not os.access(target.parent, os.W_OK):
        yield f"to={target}: {target.parent} cannot be written to. Give to=FILE in another folder."
    elif target.exists() and not _is_report(target):
        yield f"to={target}: there is something else already. Move it away, or give another file."


def _is_report(file: Path) -> bool:
    """Whether this command made the file, and may replace it."""
    from app.pages.page import GENERATOR

    with file.open("rb") as content:
        return f'content="{GENERATOR}"'.encode() in content.read(1024)


def _command(arguments: Sequence[str]) -> int:
    report(REPORT.parse(arguments), open_console())
    return 0


def main() -> None:
    """Exit codes: docs/output.md."""
    run_command(_command, lambda: command_help(__doc__, REPORT))


if __name__ == "__main__":
    main()
