"""Console script `finetune`: `finetune train recipe=lora` runs `python -m app.train recipe=lora`.

A folder app/ in the current directory does not shadow this package, including in child processes.
"""

import os
import sys
from importlib import import_module

from app import __version__
from app.config.validate import did_you_mean
from app.errors import ConfigError
from app.program import STARTED_AS

COMMANDS = {
    "train": "fine-tune a model, or run a sweep",
    "check": "check data, memory, cluster or quantization before training",
    "generate": "generate text with a fine-tuned model",
    "evaluate": "evaluate a run, optionally compared with its base model",
    "export": "export an adapter, a merged or quantized model, or GGUF",
    "convert": "convert an Axolotl, LLaMA-Factory, torchtune, Unsloth or TRL config",
    "report": "create an HTML report of a run, a sweep or a comparison",
    "board": "start, stop, watch and compare runs in a browser, and chat with them",
    "reproduce": "repeat a run and compare the results",
}


def main() -> None:
    """Run a command and exit with its exit code."""
    word, *arguments = sys.argv[1:] or ["--help"]
    if word in ("-h", "--help"):
        listed = "\n".join(f"  finetune {name:<12}{purpose}" for name, purpose in COMMANDS.items())
        sys.stdout.write(f"Fine-tune a language model.\n\n{listed}\n\nRun finetune COMMAND --help for details.\n")
    elif word == "--version":
        sys.stdout.write(f"app-finetune {__version__}\n")
    elif word in COMMANDS:
        os.environ |= {STARTED_AS: "finetune", "PYTHONSAFEPATH": "1"}
        sys.argv = [f"finetune {word}", *arguments]
        sys.orig_argv[:] = [sys.executable, "-m", f"app.{word}", *arguments]  # recorded as the command of a run
        import_module(f"app.{word}").main()
    else:
        problem = ConfigError(f"Unknown command {word!r}.{did_you_mean(word, COMMANDS)}")
        sys.stderr.write(f"{problem.report()}\n")
        sys.exit(problem.exit_code)
