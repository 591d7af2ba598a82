"""Console script `finetune`: `finetune train recipe=lora` runs the module app.train with the same arguments.

A folder app/ in the current directory does not shadow this package, including in child processes.
"""

import os
import sys
from importlib import import_module

from app import __version__
from app.config.validate import did_you_mean
from app.errors import ConfigError
from app.program import COMMANDS, STARTED_AS


def main() -> None:
    """Run a command and exit with its exit code."""
    word, *arguments = sys.argv[1:] or ["help"]
    if word == "help" and arguments and arguments[0] in COMMANDS:
        word, arguments = arguments[0], ["--help", *arguments[1:]]
    if word in ("help", "-h", "--help"):
        listed = "\n".join(f"  finetune {name:<12}{purpose}" for name, purpose in COMMANDS.items())
        sys.stdout.write(f"Fine-tune a language model.\n\n{listed}\n\nRun finetune COMMAND --help for details.\n")
    elif word in ("version", "--version"):
        sys.stdout.write(f"app-finetune {__version__}\n")
    elif word in COMMANDS:
        os.environ.setdefault(STARTED_AS, "finetune")
        os.environ["PYTHONSAFEPATH"] = "1"
        sys.argv = [f"finetune {word}", *arguments]
        sys.orig_argv[:] = [sys.executable, "-m", f"app.{word}", *arguments]  # recorded as the command of a run
        import_module(f"app.{word}").main()
    else:
        problem = ConfigError(f"Unknown command {word!r}.{did_you_mean(word, COMMANDS)}")
        sys.stderr.write(f"{problem.report()}\n")
        sys.exit(problem.exit_code)
