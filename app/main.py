"""Console script `finetune`: `finetune train recipe=lora` for `python -m app.train recipe=lora`.

Another folder app/ where the user stands does not hide this one, in child processes either.
"""

import os
import sys
from importlib import import_module

from app import __version__
from app.config.validate import did_you_mean
from app.errors import ConfigError
from app.program import STARTED_AS

COMMANDS = {
    "train": "fine-tune a model, or several in a sweep",
    "check": "look through data, memory, cluster or number formats before a run",
    "generate": "ask the model of a run",
    "evaluate": "score a run on held-out rows, beside its base too",
    "export": "write an adapter or a merged model for other programs",
    "convert": "read the settings of another program",
    "report": "make the page of a run, a sweep or a comparison",
    "board": "watch, start, stop, compare and ask runs in a browser",
    "reproduce": "run it again and compare the numbers",
}


def main() -> None:
    """Exit codes as of the command."""
    word, *arguments = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help"):
        listed = "\n".join(f"  finetune {name:<12}{purpose}" for name, purpose in COMMANDS.items())
        sys.stdout.write(f"Fine-tune a language model.\n\n{listed}\n\nfinetune COMMAND --help says more.\n")
    elif word == "--version":
        sys.stdout.write(f"app-finetune {__version__}\n")
    elif word in COMMANDS:
        os.environ |= {STARTED_AS: "finetune", "PYTHONSAFEPATH": "1"}
        sys.argv = [f"finetune {word}", *arguments]
        sys.orig_argv[:] = [sys.executable, "-m", f"app.{word}", *arguments]  # what the records of a run repeat
        import_module(f"app.{word}").main()
    else:
        problem = ConfigError(f"{word!r} is not a command.{did_you_mean(word, COMMANDS)}")
        sys.stderr.write(f"{problem.report()}\n")
        sys.exit(problem.exit_code)
