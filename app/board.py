"""Watch, start, stop, resume and compare the runs of a folder in a browser, and chat with them.

finetune board runs/                 prints a local address; open it in a browser
finetune board runs/ port=8808       fixed port

Requires starlette, uvicorn and python-multipart (extra `board`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from app.config.command_line import Changes, Command
from app.config.commands import run_command
from app.config.help import command_help
from app.config.validate import number
from app.errors import EnvironmentProblem

_PACKAGES = {"starlette": "starlette", "uvicorn": "uvicorn", "python_multipart": "python-multipart"}


@dataclass(kw_only=True, slots=True)
class BoardConfig:
    """Options of finetune board."""

    folder: str  # folder with runs and sweeps; may be typed without folder=
    port: int = number(0, at_least=0, at_most=65535)  # port on 127.0.0.1; 0: a free one


def _problems(config: BoardConfig, _changes: Changes) -> Iterator[str]:
    if not Path(config.folder).expanduser().is_dir():
        yield f"folder={config.folder}: no such folder. Give the folder that contains the runs."


BOARD = Command(schema=BoardConfig, rules=_problems, bare="folder", example="finetune board runs/")


def _command(arguments: Sequence[str]) -> int:
    config = BOARD.parse(arguments)
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        problem = f"app.board requires packages that are not installed: {', '.join(missing)}"
        raise EnvironmentProblem(f"{problem}. Run pip install {' '.join(_PACKAGES.values())}")
    from app.web.board import serve

    serve(Path(config.folder).expanduser(), config.port)
    return 0


def main() -> None:
    """Exit codes: 0 after SIGTERM, 2 if the folder, the port or a package is not available, 130 Ctrl-C."""
    run_command(_command, lambda _: command_help(__doc__, BOARD))


if __name__ == "__main__":
    main()
