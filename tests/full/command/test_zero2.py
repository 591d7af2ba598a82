"""Gradients and states divided among processes: saves that any number continues, and what each keeps."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.command.test_processes import same_numbers, with_rate
from tests.runs import SMALL, Zygote, has_reached, same_ending

ZERO2 = "parallel=zero2"


@pytest.mark.parametrize(
    ("optimizer", "within"),
    [
        ("adamw", 1e-6),
        pytest.param("adamw_8bit", 1e-5),  # coarse, as the next one is
        pytest.param("muon", 1e-5),
        pytest.param("adafactor", 1e-6),
    ],
)
def test_a_save_of_any_number_of_processes_is_continued_by_any(
    zygote: Zygote, tmp_path: Path, optimizer: str, within: float
) -> None:
    """Two that divide, then one, then two again; each time the states must be those of the steps before."""
    command = (*SMALL, "recipe=full", f"optimizer={optimizer}", "training.epochs=1", "checkpoint.every=1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ended = zygote.run(tmp_path, *command, with_rate(1), "training.max_steps=3", f"output_dir={whole}")
    assert ended.code == 0, ended.stderr
    for stop, count, parallel in ((1, 2, ZERO2), (2, 1, "parallel=auto"), (3, 2, ZERO2)):
        start = (
            *command,
            parallel,
            with_rate(count),
            "training.max_steps=3",
            f"output_dir={parts}",
            "resume=auto",
        )
        stopped = (*start, f"training.stop_after={stop}") if stop < 3 else start
        for ended in zygote.run_together(tmp_path, count, *stopped):
            assert ended.code == (75 if stop < 3 else 0), ended.stderr
    same_numbers(whole, parts, within)


@pytest.mark.parametrize("recipe", ["full", pytest.param("lora")])
def test_a_killed_process_ends_the_others_and_the_run_goes_on_to_the_last_bit(
    zygote: Zygote, tmp_path: Path, recipe: str
) -> None:
    command = (*SMALL, f"recipe={recipe}", ZERO2, "batching.accumulation=1", "training.epochs=1")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for ended in zygote.run_together(tmp_path, 2, *command, f"output_dir={whole}"):
        assert (ended.code, ended.stderr) == (0, "")
    runs = zygote.start_together(tmp_path, 2, *command, f"output_dir={killed}", "resume=auto")
    runs[0].until(partial(has_reached, killed, 5))
    os.kill(runs[1].pid, signal.SIGKILL)
    assert 0 not in [run.wait().code for run in runs]
    for ended in zygote.run_together(tmp_path, 2, *command, f"output_dir={killed}", "resume=auto"):
        assert ended.code == 0, ended.stderr
    same_ending(whole, killed)


def test_what_overflows_in_fp16_is_skipped_by_both(zygote: Zygote, tmp_path: Path) -> None:
    """The scale follows what overflowed anywhere, so it must stay the same for all: a rate so high finds out."""
    rate = ("optimizer=sgd", "optimizer.lr=1000", "schedule=constant", "training.clip=0")
    command = (*SMALL, *rate, "recipe=full", "precision=fp16", "training.max_steps=4", with_rate(2))
    scales = []
    for parallel in ("auto", "zero2"):
        run = tmp_path / parallel
        for ended in zygote.run_together(tmp_path, 2, *command, f"parallel={parallel}", f"output_dir={run}"):
            assert ended.code == 0, ended.stderr
        state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
        scales.append((state["scaler"]["scale"], state["progress"]["skipped_steps"]))
    assert scales[0] == scales[1]
    assert scales[0][1] > 0


def test_each_process_keeps_and_saves_the_states_of_its_own(zygote: Zygote, tmp_path: Path) -> None:
    command = (*SMALL, "recipe=full", "training.max_steps=2", "batching.accumulation=1")
    kept = {}
    for parallel in ("auto", "zero2"):
        run = tmp_path / parallel
        for ended in zygote.run_together(tmp_path, 2, *command, f"parallel={parallel}", f"output_dir={run}"):
            assert ended.code == 0, ended.stderr
        kept[parallel] = json.loads((run / "manifest.json").read_text())["memory"]
    for part in ("gradients", "optimizer_states"):
        assert kept["zero2"][part] == pytest.approx(kept["auto"][part] / 2, rel=0.2), part
    assert kept["zero2"]["trained_weights"] == kept["auto"]["trained_weights"]
    (save,) = (tmp_path / "zero2" / "checkpoints").iterdir()
    sizes = [
        sum(each.numel() for each in load_file(save / name).values() if each.dtype == torch.float32)
        for name in ("optimizer.safetensors", "optimizer-1.safetensors")
    ]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.3)


def test_more_processes_than_tensors_are_refused_before_weights_are_loaded(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Adapters of one layer are two."""
    one_layer = ("model.architecture.num_hidden_layers=1", "adapter.targets=[q_proj]")
    command = (*SMALL, *one_layer, "recipe=lora", ZERO2, "batching.accumulation=1", "output_dir=run")
    first, *others = zygote.run_together(tmp_path, 3, *command)
    assert [first.code, *(other.code for other in others)] == [2, 2, 2]
    assert (
        "deals what is trained to 3 processes, and there are 2 tensors. Set parallel=auto, or" in first.stderr
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
