"""Start the program quickly, wait for it, kill it, and read what it wrote."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.tracking.formatting import PHASES

if TYPE_CHECKING:
    from torch import Tensor

REPO = Path(__file__).parents[2]

SMALL = (
    "model.weights=random",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=128",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "dataset.max_rows=90",
    "dataset.eval_max_rows=12",
    "precision=fp32",
    "dataset.max_length=64",
    "batching.tokens=64",
    "batching.rows=4",
    "batching.accumulation=2",
    "training.epochs=2",  # 12 steps each, of two bins or of eight rows, the last one smaller
    "eval.every=2",
    "eval.samples=1",
    "eval.sample_tokens=4",
    "checkpoint.every=3",
    "record.every=1",
    "launch.threads=1",
)

RATE = "optimizer.lr=2e-2"
# logits that one wrong weight moves
_FINISHED = (*SMALL, "model.architecture.initializer_range=0.1", "training.max_steps=6")
FINISHED = {
    "lora": (*_FINISHED, "recipe=lora", RATE),
    "qlora": (*_FINISHED, "recipe=qlora", RATE, "precision=bf16"),
    "loftq": (*_FINISHED, "recipe=qlora", RATE, "precision=bf16", "adapter.init=loftq"),
    "qlora in fp32": (*_FINISHED, "recipe=qlora", RATE),
    "full": (*_FINISHED, "recipe=full", "optimizer.lr=1e-2"),
    "lora of few layers": (
        *(*_FINISHED, "recipe=lora", RATE),
        *("adapter.r=4", "adapter.alpha=6", "adapter.targets=[q_proj,down_proj]"),
    ),
}
# of metrics.jsonl, and memory
CLOCKS = {"tokens_per_second", "samples_per_second", "seconds", *PHASES, "peak_memory_bytes"}
PATIENCE_SECONDS = 200  # with processes that wait for each other
SECRET = "hf_secret123"  # in the environment of finished runs, and nowhere in them


def wait_until(reached: Callable[[], bool], seconds: float, said: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, said()
        time.sleep(0.002)


@dataclass
class Ended:
    """A run that is over."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Running:
    """A run in a process of its own."""

    zygote: "Zygote"
    pid: int
    out: Path
    err: Path

    def wait(self) -> Ended:
        code = self.zygote.ask({"do": "wait", "pid": self.pid})["code"]
        return Ended(code, self.out.read_text(), self.err.read_text())

    def kill(self) -> Ended:
        """As the machine would: no chance to clean up."""
        return self.stop(signal.SIGKILL)

    def stop(self, number: int) -> Ended:
        os.kill(self.pid, number)
        return self.wait()

    def until(self, reached: Callable[[], bool], seconds: float = 120) -> None:
        """Wait for something the run does; a run that ended first fails the test."""
        wait_until(reached, seconds, lambda: f"not reached: {self.out.read_text()}{self.err.read_text()}")


@dataclass
class Zygote:
    """The process that forks the runs; what these start in turn is `python`, if that is given."""

    environment: dict[str, str]
    python: Path | None = None
    process: subprocess.Popen[str] = field(init=False)
    started: int = 0

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.zygote"],
            env=self.environment,
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def start(self, folder: Path, *arguments: str, module: str = "app.train", **env: str) -> Running:
        """`python -m module arguments` in `folder`."""
        self.started += 1
        out, err = (folder / f"{name}-{self.started}.txt" for name in ("stdout", "stderr"))
        started = {"FORKED_PYTHON": str(self.python)} if self.python else {}
        answer = self.ask(
            {
                "do": "start",
                "module": module,
                "arguments": arguments,
                "cwd": str(folder),
                "env": {"XDG_CACHE_HOME": str(folder / "cache"), **started, **env},
                "stdout": str(out),
                "stderr": str(err),
            }
        )
        return Running(self, answer["pid"], out, err)

    def run(
        self, folder: Path, *arguments: str, module: str = "app.train", code: int | None = None, **env: Any
    ) -> Ended:
        """To its end; `code` is the one that it must end with."""
        ended = self.start(folder, *arguments, module=module, **env).wait()
        assert code in (None, ended.code), ended.stdout + ended.stderr
        return ended

    def finish(self, folder: Path, *arguments: str, module: str = "app.train", **env: Any) -> Ended:
        """To an end without any complaint."""
        ended = self.run(folder, *arguments, module=module, **env)
        assert (ended.code, ended.stderr) == (0, ""), ended.stdout + ended.stderr
        return ended

    def refused(self, folder: Path, *arguments: str, message: str, module: str = "app.train", **env: Any) -> Ended:
        """To a refusal, with this in its message."""
        ended = self.run(folder, *arguments, module=module, **env)
        refused(ended.code, ended.stdout, ended.stderr, message)
        return ended

    def start_together(
        self, folder: Path, count: int, *arguments: str, module: str = "app.train", **env: str
    ) -> list[Running]:
        """`count` processes of one run, as torchrun would start them."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
        return [
            self.start(folder, *arguments, module=module, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
            for rank in range(count)
        ]

    def run_together(
        self, folder: Path, count: int, *arguments: str, module: str = "app.train", code: int | None = None, **env: Any
    ) -> list[Ended]:
        """To the end of all; `code` is the one that each must end with."""
        runs = self.start_together(folder, count, *arguments, module=module, **env)
        with killed_at_last(runs):
            together = [run.wait() for run in runs]
        assert code is None or {ended.code for ended in together} == {code}, [ended.stderr for ended in together]
        return together

    def finish_together(
        self, folder: Path, count: int, *arguments: str, module: str = "app.train", **env: Any
    ) -> list[Ended]:
        together = self.run_together(folder, count, *arguments, module=module, **env)
        complaints = [(ended.code, ended.stderr) for ended in together]
        assert complaints == [(0, "")] * count, complaints
        return together

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextlib.contextmanager
def killed_at_last(runs: Sequence[Running]) -> Iterator[None]:
    """Processes that do not make the same collectives wait for ever; after PATIENCE_SECONDS they are killed."""

    def kill() -> None:
        for run in runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pid, signal.SIGKILL)

    over = threading.Timer(PATIENCE_SECONDS, kill)
    over.start()
    try:
        yield
    finally:
        over.cancel()


@dataclass
class FinishedRuns:
    """Small runs with two checkpoints, each trained once in a session; what writes takes a copy."""

    zygote: Zygote
    folder: Path
    said: dict[str, str] = field(default_factory=dict)

    def __call__(self, recipe: str = "lora") -> Path:
        run = self.folder / recipe.replace(" ", "-")
        if recipe not in self.said:
            ended = self.zygote.finish(self.folder, *FINISHED[recipe], f"output_dir={run}", HF_TOKEN=SECRET)
            self.said[recipe] = ended.stdout
        return run

    def copy(self, to: Path, recipe: str = "lora") -> Path:
        return Path(shutil.copytree(self(recipe), to))


def metrics(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; what a kill tore off is left out."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def samples_of(values: Mapping[str, float]) -> int:
    """The data rows that the rate of a line or of a result is of."""
    return round(values["samples_per_second"] * values["seconds"])


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


def numbers(run: Path) -> list[dict[str, Any]]:
    """What must not depend on when the run was killed: everything but clocks and memory."""
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in metrics(run)]


def result(run: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((run / "result.json").read_text())
    return values


def has_reached(run: Path, step: int) -> bool:
    return any(line["step"] >= step for line in metrics(run))


def tensors(run: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file

    (file,) = (run / "final").glob("*.safetensors")
    return load_file(file)


def same_numbers(one: Path, two: Path, within: float = 1e-6) -> None:
    for mine, theirs in zip(metrics(one), metrics(two), strict=True):
        assert mine.keys() ^ theirs.keys() <= PHASES.keys()  # a step repeated after OOM is not timed
        for key in mine.keys() - CLOCKS:
            assert theirs[key] == pytest.approx(mine[key], rel=within), (mine["step"], key)
        assert "loss" not in mine or samples_of(mine) == samples_of(theirs) > 0


def same_ending(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    finals = [sorted(f.name for f in (run / "final").iterdir()) for run in (one, other)]
    assert finals[0] == finals[1]
    for name in finals[0]:
        if name.endswith(".safetensors"):
            same_tensors(*(run / "final" / name for run in (one, other)))


def same_tensors(one: Path, other: Path) -> None:
    """Names and bits of two files."""
    from safetensors.torch import load_file

    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    assert [name for name in left if not left[name].equal(right[name])] == []


def refused(code: int, stdout: str, stderr: str, message: str) -> None:
    assert code == 2, stderr
    assert stderr.startswith("error: ")
    assert stderr.count("error: ") == 1
    assert message in stderr
    assert "Traceback" not in stdout + stderr


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
