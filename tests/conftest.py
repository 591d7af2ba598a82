"""What all tests share: a clean process, an empty cache, the program as a subprocess, the gpu verdict."""

import gc
import os
import subprocess
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from app.program import STARTED_AS
from tests.global_state import restored
from tests.harness import marks
from tests.harness.forked_python import program
from tests.harness.processes import ProcessesByCount
from tests.harness.python import python
from tests.harness.runs import FinishedRuns, Zygote

REPO = Path(__file__).parent.parent
GPU_TESTS = REPO / "tests" / "gpu"
FIXED = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "WANDB_MODE": "offline", STARTED_AS: "finetune"}
# Of the developer's environment, what would change a run, or is a secret that no test needs.
DROPPED = (
    "ACCELERATE_",
    "HF_TOKEN",
    "HF_HOME",
    "HUGGING_FACE_HUB_TOKEN",
    "PYTEST_",
    "PYTHON",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_",  # torch itself sets it in a process that has compiled
    "TRITON_INTERPRET",
    "WANDB_",
)
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

TIER = os.environ.get("APP_TEST_TIER", "quick")

# Time of an example says more about a busy machine, or a first import, than about what is tested.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=20)
hypothesis.settings.register_profile("full", deadline=None, max_examples=200)
hypothesis.settings.load_profile("full" if TIER == "full" else "quick")

if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"  # Triton is imported by others too, and reads it as it is
os.environ.update(FIXED)  # here, because libraries read it once, when a test module imports them


@dataclass
class RunApp:
    """The program in a process of its own, to its end: `run_app("recipe=full", "training.max_steps=2")`."""

    folder: Path
    environment: dict[str, str]

    def __call__(
        self,
        *args: str,
        module: str = "app.train",
        env: dict[str, str] | None = None,
        timeout: float = 180,
        code: int | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        """`env` is added to the environment; `code` is the one that it must end with."""
        env = self.environment | (env or {})
        ended = python("-m", module, *args, cwd=self.folder, env=env, timeout=timeout)
        assert code in (None, ended.returncode), ended.stdout + ended.stderr
        return ended


@pytest.fixture(autouse=True)
def _clean_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with restored():
        os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
        yield


def _environment_of_processes() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED) and k not in RANKS}
    return kept | FIXED | {"PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """One serves all tests of a worker."""
    served = Zygote(_environment_of_processes())
    yield served
    served.close()


@pytest.fixture(scope="session")
def processes(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessesByCount]:
    """`processes(2).run(function)`: in two processes of one group, which stay for the session."""
    started = ProcessesByCount(zygote, tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def quick_python(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python that is there at once, for scripts that start one: it forks the zygote."""
    place = tmp_path_factory.mktemp("python")
    server = zygote.start(place, str(place / "server"), module="tests.harness.forked_python")
    server.until((place / "server").exists)
    yield program(place, place / "server")
    server.kill()


@pytest.fixture(scope="session")
def quick_zygote(zygote: Zygote, quick_python: Path) -> Zygote:
    """Its runs start the Python that is there at once: to prove an export, or as processes of a group."""
    quick = copy(zygote)
    quick.python, quick.started = quick_python, 1 << 16
    return quick


@pytest.fixture(scope="session")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """`finished("qlora")`: a small run that is over."""
    return FinishedRuns(zygote, tmp_path_factory.mktemp("finished"))


@pytest.fixture
def app_env(_clean_process: None) -> dict[str, str]:
    """The environment for a process of ours: offline, one thread, an empty cache, no settings of the user."""
    return _environment_of_processes()


@pytest.fixture
def run_app(app_env: dict[str, str], tmp_path: Path) -> RunApp:
    return RunApp(tmp_path, app_env)


def pytest_markeval_namespace() -> dict[str, Any]:
    return marks.names_of_conditions()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(marks.requires_gpu)


def pytest_collection_finish() -> None:
    """No collection of garbage in a test walks through all modules and tests."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to repeat a failure; in the gpu tier each skipped test by name, and whether it may be."""
    seed = getattr(terminalreporter.config.option, "randomly_seed", None)
    if seed is not None and {"failed", "error"} & terminalreporter.stats.keys():
        terminalreporter.write_line(f"the same order again: --randomly-seed={seed}")
    if TIER != "gpu":
        return
    for test, reason, allowed in _skipped(terminalreporter):
        terminalreporter.write_line(f"skipped{'' if allowed else ', NOT ALLOWED with a GPU'}: {test}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With a GPU, a test of the gpu tier that does not run is a failure, or nobody would notice."""
    if TIER != "gpu" or session.exitstatus != pytest.ExitCode.OK:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not all(allowed for _, _, allowed in _skipped(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skipped(reporter: pytest.TerminalReporter) -> list[tuple[str, str, bool]]:
    found = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        found.append((report.nodeid, reason, reason in marks.ALLOWED_WITH_GPU or marks.num_gpus() == 0))
    return found
