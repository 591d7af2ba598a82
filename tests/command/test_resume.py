"""A run that is killed or stopped and then resumed equals one that nothing disturbed, to the last bit."""

import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.signals import CODES, HEARD, NOTHING_TO_SAVE
from tests.conftest import REPO, RunApp
from tests.harness.runs import (
    CLOCKS,
    FINISHED,
    SMALL,
    Ended,
    FinishedRuns,
    Running,
    Zygote,
    has_reached,
    killed_at_last,
    losses,
    metrics,
    result,
    same_ending,
    same_tensors,
)

KILL, TERM, HUP, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT
# Two epochs of five or six steps.
BRIEF = (*SMALL, "dataset.max_rows=40", "dataset.eval_max_rows=6", "eval.every=4", "checkpoint.every=2")


def brief(_place: Path) -> Sequence[str]:
    return BRIEF


@dataclass(frozen=True)
class Row:
    """A run, and the signal that ends each of its starts but the last, once it has made so many steps."""

    words: str
    stops: tuple[tuple[signal.Signals, int], ...] = ((KILL, 7),)  # in the second epoch
    processes: int = 1
    damaged: bool = False  # the newest checkpoint, before the last start
    base: Callable[[Path], Sequence[str]] = brief  # writes files to a folder and returns words that precede

    def __str__(self) -> str:
        stops = ",".join(f"{number.name}@{step}" for number, step in self.stops)
        return f"{self.base.__name__} {self.processes}x {stops} {self.words}"


ROWS = [
    Row("recipe=lora adapter.dropout=0.1", ((HUP, 3), (KILL, 7)), damaged=True),
    Row("recipe=lora adapter.dropout=0.1 batching.accumulation=1", processes=2),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_stopped_run_resumes_bit_for_bit(row: Row, zygote: Zygote, tmp_path: Path) -> None:
    check_resumed(row, zygote, tmp_path)


def check_resumed(row: Row, zygote: Zygote, place: Path) -> None:
    """Run the row undisturbed and in parts, each of which finds its output folder but no cache."""
    whole, parts, cache = place / "whole", place / "parts", place / "a cache"
    command = (*row.base(place), *row.words.split(), "cache_dir='a cache'")
    cache.mkdir()
    finish(row, zygote, place, *command, f"output_dir={whole}")
    steps = [line["step"] for line in metrics(whole) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 2 + max(step for _, step in row.stops)

    again = (*command, f"output_dir={parts}", "resume=auto")
    for number, step in row.stops:
        running = start(row, zygote, place, *again)
        with killed_at_last(running):
            running[0].until(partial(has_reached, parts, max(step, len(losses(parts)) + 1)))
            check_end(number, step % row.processes, running, parts, again)
        shutil.rmtree(cache)
        cache.mkdir()
    if row.damaged:
        flip_last_byte(max((parts / "checkpoints").iterdir()) / "weights.safetensors")
    assert ("damaged" in finish(row, zygote, place, *again).stdout) == row.damaged

    same_ending(whole, parts)
    assert result(parts)["status"] == "finished"
    assert result(parts)["start_metrics"]["eval_loss"] > 0
    assert result(parts)["start_metrics"] == result(whole)["start_metrics"]
    saves = [max((run / "checkpoints").iterdir()) for run in (whole, parts)]
    assert state_of(saves[0]) == state_of(saves[1])
    skipped = state_of(saves[1])["progress"]["skipped_steps"]
    assert (skipped > 0) == ("precision=fp16" in row.words), "the first loss scale overflows"
    for file in saves[0].glob("*.safetensors"):
        same_tensors(file, saves[1] / file.name)


def start(row: Row, zygote: Zygote, place: Path, *command: str) -> list[Running]:
    if row.processes == 1:
        return [zygote.start(place, *command)]
    return zygote.start_together(place, row.processes, *command)


def finish(row: Row, zygote: Zygote, place: Path, *command: str) -> Ended:
    """The end of the first process; all succeed."""
    running = start(row, zygote, place, *command)
    with killed_at_last(running):
        ended = [run.wait() for run in running]
    assert [each.code for each in ended] == [0] * row.processes, ended
    return ended[0]


def check_end(number: int, victim: int, running: Sequence[Running], parts: Path, command: Sequence[str]) -> None:
    """Signal one of the processes; all end, killed ones at once, asked ones after a save and with the next command."""
    began = time.monotonic()
    os.kill(running[victim].pid, number)
    ended = [run.wait() for run in running]
    if number == signal.SIGKILL:
        assert ended[victim].code == -signal.SIGKILL, ended
        assert 0 not in [each.code for each in ended]
        assert time.monotonic() - began < 30
        return
    (stopped,) = ended
    assert stopped.code == CODES[signal.Signals(number)], stopped
    assert "Traceback" not in stopped.stderr
    assert (number == signal.SIGINT) == (HEARD in stopped.stderr)
    assert result(parts)["status"] == "stopped"
    assert (parts / "checkpoints" / f"step-{result(parts)['steps']:06d}").is_dir()
    *_, saved, report, resume, typed = stopped.stdout.splitlines()
    assert saved.startswith("Stopped. Saved checkpoint at step ")
    assert [report, resume] == [f"report  {parts / 'report.html'}", "To resume:"]
    assert shlex.split(typed) == ["finetune", "train", *command]


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def state_of(save: Path) -> dict[str, Any]:
    """Counts, loss scale and optimizer settings of a checkpoint."""
    state = json.loads((save / "state.json").read_text())
    return {key: state[key] for key in ("progress", "scaler", "optimizer", "choices")}


def test_resumed_finished_run_keeps_its_result(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    ended = zygote.run(tmp_path, *FINISHED["lora"], f"output_dir={run}", "resume=auto")
    assert (ended.code, "; the run was already complete\n" in ended.stdout) == (0, True)
    assert "\nResumed from step " in ended.stdout
    steps = [line for line in metrics(run) if "loss" in line]
    assert result(run)["tokens_per_second"] == steps[-1]["tokens_per_second"]
    of_a_start = {*CLOCKS, "memory_measured_bytes", "final"}
    before, after = ({k: v for k, v in result(each).items() if k not in of_a_start} for each in (finished(), run))
    assert after == before
    assert after["final_metrics"].keys() >= {"eval_loss", "eval_loss_margin", "exact_match"}
    cards = [(each / "final" / "README.md").read_text().splitlines() for each in (finished(), run)]
    assert [line for line in cards[1] if line not in cards[0] and "| peak memory |" not in line] == []
    assert len(cards[0]) == len(cards[1])


def test_resume_with_a_changed_setting_is_refused_before_torch(
    run_app: RunApp, finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished.copy(tmp_path / "run")
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    words = (*FINISHED["lora"], f"output_dir={run}", "resume=auto", "optimizer.lr=0.5")
    ended = run_app(*words, env={"PYTHONPATH": f"{tmp_path}:{REPO}"}, code=2)
    assert "to 0.5. A resumed run keeps its settings. For a new run with the change: " in ended.stderr
    assert f"finetune train from={run} optimizer.lr=0.5" in ended.stderr
    (run / "run.yaml").write_text("of_another_version: 1\n")
    ended = run_app(*words, env={"PYTHONPATH": f"{tmp_path}:{REPO}"}, code=1)
    assert "torch was imported" in ended.stderr, "compared with the checkpoint instead"


@pytest.mark.parametrize("count", [1, 2])
def test_stop_before_the_first_step_leaves_nothing(zygote: Zygote, tmp_path: Path, count: int) -> None:
    runs = zygote.start_together(tmp_path, count, *SMALL, "output_dir=run")
    runs[0].until(lambda: runs[0].out.exists() and f"output  {tmp_path / 'run'}\n" in runs[0].out.read_text())
    for run in runs:
        os.kill(run.pid, signal.SIGTERM)
    ended = [run.wait() for run in runs]
    assert [each.code for each in ended] == [75] * count
    assert ended[0].stderr == NOTHING_TO_SAVE
    for each in ended[1:]:  # torch may write that a signal interrupted its connection
        assert NOTHING_TO_SAVE not in each.stderr
        assert "Traceback" not in each.stderr
    assert not (tmp_path / "run").exists()
