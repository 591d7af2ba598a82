"""Create a self-contained HTML report of a run, a sweep or several runs.

finetune report run=runs/mine                    runs/mine/report.html, which each run also writes when it ends
finetune report sweep=runs/sweep-lr-d45e4692     leaderboard, and effect of each setting
finetune report runs=runs/a,runs/b to=a-b.html   comparison of curves and settings
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.config.commands import REPORT, ReportConfig, run_command
from app.config.help import command_help
from app.errors import CheckpointError, refuse
from app.files import write_text
from app.pages.read_run import is_run, read_sweep
from app.tracking.console import Console, open_console

if TYPE_CHECKING:
    from app.pages.page import Page

# pages are imported inside functions so that command-line errors are reported without loading YAML and jinja2

_SWEEP = "sweep.json"


def report(config: ReportConfig, console: Console) -> None:
    """Write the report."""
    refuse([*_folder_problems(config), *_target_problems(config)])
    from app.pages.page import PAGE_FAULTS, as_html

    try:
        page = as_html(_page(config))
    except PAGE_FAULTS as fault:
        options = " ".join(name for name, _ in config.folders)
        raise CheckpointError(
            f"{options}: a file is damaged ({type(fault).__name__}: {fault}). Restore the folder from a copy, or move "
            "manifest.json, preview.json or samples.jsonl away: the report works without them."
        ) from fault
    write_text(config.target, page)
    console.say(f"report  {config.target}")


def _page(config: ReportConfig) -> "Page":
    folders = [folder for _, folder in config.folders]
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
    for named, folder in config.folders:
        is_sweep = (folder / _SWEEP).is_file()
        if not folder.is_dir():
            yield f"{named}: no such folder. Give the output_dir of a run or a sweep."
        elif config.sweep is None and not is_run(folder):
            instead = f"Give sweep={folder}" if is_sweep else "Give the output_dir of a run"
            yield f"{named}: no run found. {instead}."
        elif config.sweep is not None and not is_sweep:
            instead = f"Give run={folder}" if is_run(folder) else "Give the output_dir of a sweep"
            yield f"{named}: no {_SWEEP} found. {instead}."
        elif config.sweep is not None and read_sweep(folder) is None:
            yield f"{named}: {_SWEEP} cannot be read. Run the command of the sweep again to rewrite it."


def _target_problems(config: ReportConfig) -> Iterator[str]:
    target = config.target
    if target.is_dir():
        yield f"to={target}: this is a folder. Give a file in it, e.g. to={target / 'report.html'}."
    elif config.to is not None and not target.parent.is_dir():
        yield f"to={target}: no such folder: {target.parent}. Create it, or choose another file."
    elif target.parent.is_dir() and not os.access(target.parent, os.W_OK):
        yield f"to={target}: {target.parent} is not writable. Set to=FILE in another folder."
    elif target.exists() and not _is_report(target):
        yield f"to={target}: the file exists and is not a report. Move it away, or choose another file."


def _is_report(file: Path) -> bool:
    """Return whether the file is a report, which may be overwritten."""
    from app.pages.page import GENERATOR

    with file.open("rb") as content:
        return f'content="{GENERATOR}"'.encode() in content.read(1024)


def _command(arguments: Sequence[str]) -> int:
    report(REPORT.parse(arguments), open_console())
    return 0


def main() -> None:
    """Exit codes: docs/output.md."""
    run_command(_command, lambda _: command_help(__doc__, REPORT))


if __name__ == "__main__":
    main()
