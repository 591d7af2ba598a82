"""A process that has imported what the program imports, and forks one real process for each run.

Starting the program costs seconds of imports; tests that start it dozens of times, and kill it, fork it instead.
What runs in the fork is `app.train.main` with a command line, its own environment, folder and output files.

    python -m tests.harness.zygote      reads one JSON command a line, answers one JSON line each
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

IMPORTS = (
    "torch",
    "peft",
    "accelerate",
    "bitsandbytes.optim",
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
    "app.training.resolve",
    "app.training.final_model",
    "app.training.samples",
    "app.evaluation.run",
    "app.model.build",
    "app.model.load_run",
    "app.optim.optimizers",
)


def serve() -> None:
    """Answer until standard input ends."""
    for name in IMPORTS:
        importlib.import_module(name)
    _answer({"ready": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            _answer({"pid": _fork(command)})
        else:
            _, status = os.waitpid(command["pid"], 0)
            _answer({"code": os.waitstatus_to_exitcode(status)})


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _fork(command: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _run(command)
    except BaseException:  # noqa: BLE001 (the fork must never return to the loop of its parent)
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _run(command: dict[str, Any]) -> int:
    os.chdir(command["cwd"])
    os.environ.update(command["env"])
    for number, path in ((0, os.devnull), (1, command["stdout"]), (2, command["stderr"])):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = [command["module"], *command["arguments"]]
    try:
        importlib.import_module(command["module"]).main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


if __name__ == "__main__":
    serve()
