"""A killed run continues as if nothing had happened: the same numbers to the last bit."""

import os
import random
import shlex
import signal
import sys
from pathlib import Path

import pytest

from app.signals import HEARD, NOTHING_TO_SAVE
from tests.harness.runs import (
    CLOCKS,
    FINISHED,
    SMALL,
    FinishedRuns,
    Zygote,
    content_of,
    killed_and_resumed,
    metrics,
    result,
    same_ending,
)


def test_killed_run_resumes_bit_for_bit(zygote: Zygote, tmp_path: Path) -> None:
    check_killed_and_resumed(zygote, tmp_path, "recipe=lora adapter.dropout=0.1", kills=1)


def check_killed_and_resumed(zygote: Zygote, tmp_path: Path, words: str, kills: int) -> None:
    moments = sorted(random.Random(words).sample(range(2, 22), kills))
    whole, killed = killed_and_resumed(zygote, tmp_path, tmp_path, *SMALL, *words.split(), at=moments)
    steps = [line["step"] for line in metrics(whole) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 22
    same_ending(whole, killed)
    assert result(killed)["status"] == "finished"
    assert 0 < result(killed)["start_metrics"]["eval_loss"] == result(whole)["start_metrics"]["eval_loss"]


def test_resumed_finished_run_keeps_its_result(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    ended = zygote.run(tmp_path, *FINISHED["lora"], f"output_dir={run}", "resume=auto")
    assert (ended.code, "; nothing was left to do\n" in ended.stdout) == (0, True)
    steps = [line for line in metrics(run) if "loss" in line]
    assert result(run)["tokens_per_second"] == steps[-1]["tokens_per_second"]
    of_a_start = {*CLOCKS, "memory_measured_bytes", "final"}
    before, after = ({k: v for k, v in result(each).items() if k not in of_a_start} for each in (finished(), run))
    assert after == before
    assert after["final_metrics"].keys() >= {"eval_loss", "eval_loss_margin", "exact_match"}
    cards = [(each / "final" / "README.md").read_text().splitlines() for each in (finished(), run)]
    assert [line for line in cards[1] if line not in cards[0] and "| peak memory |" not in line] == []
    assert len(cards[0]) == len(cards[1])


def test_run_killed_after_it_went_back_goes_on_from_there(
    zygote: Zygote, finished: FinishedRuns, tmp_path: Path
) -> None:
    run = finished.copy(tmp_path / "run")
    words = (*FINISHED["lora"], f"output_dir={run}")
    start = zygote.start(tmp_path, *words, "checkpoint.every=0", f"resume={run}/checkpoints/step-000003")
    start.until(lambda: metrics(run)[-1]["step"] < 6)
    start.kill()
    assert (run / "checkpoints" / "step-000006").is_dir()
    zygote.run(tmp_path, *words, "resume=auto", code=0)
    same_ending(finished(), run)


def test_resume_elsewhere_writes_a_random_base(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    save, other = finished() / "checkpoints" / "step-000003", tmp_path / "other"
    zygote.run(tmp_path, *FINISHED["lora"], f"output_dir={other}", f"resume={save}", code=0)
    assert content_of(other / "base") == content_of(finished() / "base")


def test_stopped_run_resumes_bit_for_bit(zygote: Zygote, tmp_path: Path) -> None:
    check_stopped_and_continued(zygote, tmp_path, signal.SIGHUP, 75)


def check_stopped_and_continued(zygote: Zygote, tmp_path: Path, number: int, code: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    (tmp_path / "a b").mkdir()
    command = (*SMALL, "checkpoint.every=0", "training.max_steps=10", "cache_dir='a b'")
    zygote.run(tmp_path, *command, f"output_dir={whole}", code=0)
    run = zygote.start(tmp_path, *command, f"+output_dir={stopped}")
    run.until(lambda: len(metrics(stopped)) >= 3)
    ended = run.stop(number)
    assert ended.code == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert (number == signal.SIGINT) == (HEARD in ended.stderr)
    assert result(stopped)["status"] == "stopped"
    said = ended.stdout.splitlines()
    assert said[-4].endswith("which is saved.")
    assert said[-3:-1] == [f"report  {stopped / 'report.html'}", "To go on:"]
    python, *words = shlex.split(said[-1])
    assert words == ["-m", "app.train", *command, f"output_dir={stopped}", "resume=auto"]
    assert python in ("python", sys.executable)
    zygote.run(tmp_path, *words[2:], code=0)
    same_ending(whole, stopped)


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


def test_resume_passes_over_damaged_checkpoint(zygote: Zygote, finished: FinishedRuns, tmp_path: Path) -> None:
    hurt = finished.copy(tmp_path / "hurt")
    newest = sorted((hurt / "checkpoints").iterdir())[-1] / "weights.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    ended = zygote.run(tmp_path, *FINISHED["lora"], f"output_dir={hurt}", "resume=auto", code=0)
    assert "damaged" in ended.stdout
    same_ending(finished(), hurt)
