"""A killed run continues as if nothing had happened: the same numbers to the last bit."""

import json
import os
import random
import shlex
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open

from app.engine.signals import HEARD
from tests.runs import SMALL, Zygote, has_reached, metrics, result, same_ending


@pytest.mark.parametrize(
    ("recipe", "optimizer", "more"),
    [
        ("lora", "adamw", "adapter.dropout=0.1"),
        ("full", "adamw_8bit", "training.recompute=true"),
        ("full", "adamw", "batching.packing=false"),
        ("lora", "adamw_8bit", "batching.packing=false"),
        ("qlora", "paged_adamw_8bit", "adapter.dropout=0.1"),
    ],
)
def test_killed_three_times_and_resumed_it_gives_the_same_numbers(
    zygote: Zygote, tmp_path: Path, recipe: str, optimizer: str, more: str
) -> None:
    command = (*SMALL, f"recipe={recipe}", f"optimizer={optimizer}", more)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = zygote.run(tmp_path, *command, f"output_dir={whole}")
    assert ended.code == 0, ended.stderr
    steps = [line["step"] for line in metrics(whole) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 22

    moments = sorted(random.Random(f"{recipe}{optimizer}").sample(range(2, 22), 3))
    for moment in moments:
        run = zygote.start(tmp_path, *command, f"output_dir={killed}", "resume=auto")
        run.until(partial(has_reached, killed, moment))
        run.kill()
    ended = zygote.run(tmp_path, *command, f"output_dir={killed}", "resume=auto")
    assert ended.code == 0, ended.stderr
    same_ending(whole, killed)
    assert result(killed)["status"] == "finished"


def test_a_finished_run_has_nothing_left_to_do_and_keeps_its_speed(zygote: Zygote, tmp_path: Path) -> None:
    command = (*SMALL, "training.max_steps=2", f"output_dir={tmp_path / 'run'}", "resume=auto")
    first, second = (zygote.run(tmp_path, *command) for _ in range(2))
    assert (first.code, "nothing was left to do" in first.stdout) == (0, False)
    assert (second.code, "; nothing was left to do\n" in second.stdout) == (0, True)
    assert (
        result(tmp_path / "run")["tokens_per_second"]
        == [line for line in metrics(tmp_path / "run") if "loss" in line][-1]["tokens_per_second"]
    )


def test_eight_bit_states_are_saved_as_bytes(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = zygote.run(
        tmp_path, *SMALL, "recipe=full", "optimizer=adamw_8bit", "training.max_steps=1", f"output_dir={run}"
    )
    assert ended.code == 0, ended.stderr
    with safe_open(run / "checkpoints/step-000001/optimizer.safetensors", "pt") as states:
        kinds = {states.get_slice(key).get_dtype() for key in states.keys()}  # noqa: SIM118 (not a mapping)
    assert "U8" in kinds


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_asked_to_stop_it_saves_and_continues_the_same(
    zygote: Zygote, tmp_path: Path, number: int, code: int
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    (tmp_path / "a b").mkdir()
    command = (*SMALL, "checkpoint.every=0", "training.max_steps=10", "cache_dir='a b'")
    assert zygote.run(tmp_path, *command, f"output_dir={whole}").code == 0
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
    assert zygote.run(tmp_path, *words[2:]).code == 0
    same_ending(whole, stopped)


def test_asked_again_and_again_it_still_saves(zygote: Zygote, tmp_path: Path) -> None:
    """As a cluster does, whose launchers each pass the signal on."""
    run = tmp_path / "run"
    started = zygote.start(tmp_path, *SMALL, f"output_dir={run}")
    started.until(partial(has_reached, run, 3))

    def has_ended() -> bool:
        os.kill(started.pid, signal.SIGTERM)
        return Path(f"/proc/{started.pid}/stat").read_text().split()[2] == "Z"

    started.until(has_ended, seconds=60)
    ended = started.wait()
    assert ended.code == 75, ended.stderr
    assert result(run)["status"] == "stopped"


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(zygote: Zygote, tmp_path: Path) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    command = (*SMALL, "training.max_steps=8")
    for run in (whole, hurt):
        assert zygote.run(tmp_path, *command, f"output_dir={run}").code == 0
    for name in ("step-000008", "step-000006"):
        file = hurt / "checkpoints" / name / "weights.safetensors"
        assert file.exists() == (name == "step-000008" or (hurt / "checkpoints" / name).exists())
    newest = sorted((hurt / "checkpoints").iterdir())[-1] / "weights.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    ended = zygote.run(tmp_path, *command, f"output_dir={hurt}", "resume=auto")
    assert ended.code == 0, ended.stderr
    assert "damaged" in ended.stdout
    same_ending(whole, hurt)


def test_a_finished_run_can_be_made_longer(zygote: Zygote, tmp_path: Path) -> None:
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    command = (*SMALL, "schedule=constant", "schedule.warmup_fraction=0")
    assert zygote.run(tmp_path, *command, "training.max_steps=6", f"output_dir={whole}").code == 0
    assert zygote.run(tmp_path, *command, "training.max_steps=4", f"output_dir={longer}").code == 0
    ended = zygote.run(tmp_path, *command, "training.max_steps=6", f"output_dir={longer}", "resume=auto")
    assert ended.code == 0, ended.stderr
    losses = [[line["loss"] for line in metrics(run) if "loss" in line] for run in (whole, longer)]
    assert losses[0] == losses[1]


def test_another_run_is_not_continued(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert zygote.run(tmp_path, *SMALL, "training.max_steps=3", f"output_dir={run}").code == 0
    before = (run / "metrics.jsonl").read_text()
    ended = zygote.run(
        tmp_path,
        *SMALL,
        "training.max_steps=3",
        f"output_dir={run}",
        "resume=auto",
        "seed=7",
        "optimizer.lr=1",
    )
    assert ended.code == 2
    assert "seed: the checkpoint has 0, this run has 7" in ended.stderr
    assert "optimizer.lr" in ended.stderr
    assert (run / "metrics.jsonl").read_text() == before
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
