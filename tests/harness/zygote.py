"""A process that has imported what the program imports, and forks one real process for each run.

Starting the program costs seconds of imports; tests that start it dozens of times, and kill it, fork it instead.
What runs in the fork is `app.train.main` with a command line, its own environment, folder and output files.

    python -m tests.harness.zygote      reads one JSON command a line, answers one JSON line each
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

IMPORTS = (
    "torch",
    "peft",
    "accelerate",
    "bitsandbytes.optim",
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
    # what these import only when they are used
    "pandas",
    "pyarrow.compute",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
    "torch._subclasses.schema_check_mode",
    "pyarrow.pandas_compat",
    "rich.table",
    *(f"app.{command}" for command in ("train", "check", "evaluate", "generate", "export", "reproduce")),
    "app.training.run",
    "app.evaluation.run",
    "app.exports.export",
    "app.finished.inference",
    "app.memory.planner",
    "app.pages.run_page",
)

FORKED_PYTHON = "FORKED_PYTHON"  # in the environment of a run: the Python that it starts


def serve() -> None:
    """Answer until standard input ends."""
    for name in IMPORTS:
        importlib.import_module(name)
    _fill_caches()
    _answer({"ready": os.getpid()})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "start":
            _answer({"pid": _fork(command)})
        else:
            _, status = os.waitpid(command["pid"], 0)
            _answer({"code": os.waitstatus_to_exitcode(status)})


def _fill_caches() -> None:
    """Fill caches that every fork would fill: parsers, patterns and templates, which do not depend on a run."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from app.config.load import compose_run
    from app.pages.page import Page, as_html
    from tests.harness.runs import FINISHED

    compose_run([*FINISHED["lora"], "output_dir=run"])
    get_checkpoint_conversion_mapping("llama")
    as_html(Page("page", []))
    gc.collect()
    gc.freeze()  # no fork walks through them, or copies them to count references


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _fork(command: dict[str, Any]) -> int:
    pid = os.fork()
    if not pid:
        end_after(lambda: _run(command))
    return pid


def _run(command: dict[str, Any]) -> None:
    os.chdir(command["cwd"])
    os.environ.update(command["env"])
    for number, path in ((0, os.devnull), (1, command["stdout"]), (2, command["stderr"])):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    sys.executable = command["env"].get(FORKED_PYTHON, sys.executable)
    run_module(command["module"], command["arguments"])


def run_script(path: str, arguments: Sequence[str], ignored: Collection[int] = ()) -> None:
    """`python path arguments`, as far as a fork can: it finds nothing of the program imported."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "app"]:
        del sys.modules[name]
    _reset_signals(ignored)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def run_module(name: str, arguments: Sequence[str], ignored: Collection[int] = ()) -> None:
    """`python -m name arguments`, as far as a fork can: its `main`, with the signals of a new process."""
    _reset_signals(ignored)
    sys.argv = [name, *arguments]
    importlib.import_module(name).main()


def _reset_signals(ignored: Collection[int]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else default)


def end_after(work: Callable[[], None]) -> NoReturn:
    """The rest of a fork, which must never return to the loop of its parent."""
    code: Any = 1
    try:
        work()
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:  # noqa: BLE001 (it ends here)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve()
