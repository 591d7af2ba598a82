"""A killed run continues as if nothing had happened: the same numbers to the last bit."""

import os
import shlex
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.command.test_resume import check_killed_and_resumed, check_stopped_and_continued
from tests.conftest import RunApp
from tests.harness.runs import SMALL, Zygote, has_reached, losses, metrics, result


def test_repeated_signals_still_save(zygote: Zygote, tmp_path: Path) -> None:
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


def test_resume_with_other_words_prints_the_command_of_the_run(run_app: RunApp, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    words = (*SMALL, "seed=3", "training.max_steps=4", "training.stop_after=2")
    assert run_app(*words, f"output_dir={run}").returncode == 75
    refused = run_app(*SMALL, f"output_dir={run}", "resume=auto", code=2)
    assert "seed: the checkpoint has 3, this run has 0" in refused.stderr
    _, typed = refused.stderr.split("To go on:\n")
    assert shlex.split(typed)[3:] == [*words, f"output_dir={run}", "resume=auto"]
    (run / "manifest.json").write_text('{"starts": ')
    run_app(*words[:-1], f"output_dir={run}", "resume=auto", code=0)
    assert "manifest.json cannot be read" in (run / "log.txt").read_text()


def test_finished_run_can_be_extended(zygote: Zygote, tmp_path: Path) -> None:
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    command = (*SMALL, "schedule=constant", "schedule.warmup_fraction=0")
    assert zygote.run(tmp_path, *command, "training.max_steps=6", f"output_dir={whole}").code == 0
    assert zygote.run(tmp_path, *command, "training.max_steps=4", f"output_dir={longer}").code == 0
    zygote.run(tmp_path, *command, "training.max_steps=6", f"output_dir={longer}", "resume=auto", code=0)
    assert losses(whole) == losses(longer)


@pytest.mark.parametrize(
    ("words", "kills"),
    [
        ("recipe=full optimizer=adamw_8bit optimizer.embedding_states=32bit batching.packing=false", 3),
        ("recipe=qlora optimizer=paged_adamw_8bit training.recompute=true", 3),
        ("recipe=full optimizer=adamw optimizer.implementation=foreach", 1),
        ("recipe=full optimizer=sgd optimizer.implementation=loop", 1),
        ("recipe=full optimizer=adamw_bnb_32bit", 1),
        ("recipe=lora adapter.lr_ratio=16", 1),
        ("recipe=full precision=bf16 model.norm=low model.architecture.model_type=gpt_neox", 1),
        ("recipe=full quantization=qat", 1),
    ],
)
def test_killed_run_resumes_bit_for_bit(zygote: Zygote, tmp_path: Path, words: str, kills: int) -> None:
    check_killed_and_resumed(zygote, tmp_path, words, kills)
    if "embedding_states" in words:
        (*_, save) = sorted((tmp_path / "whole" / "checkpoints").iterdir())
        with safe_open(save / "optimizer.safetensors", "pt") as states:
            kinds = {states.get_slice(key).get_dtype() for key in states.keys()}  # noqa: SIM118 (not a mapping)
        assert "U8" in kinds, "states of eight bits are saved as bytes"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_stopped_run_resumes_bit_for_bit(zygote: Zygote, tmp_path: Path, number: int, code: int) -> None:
    check_stopped_and_continued(zygote, tmp_path, number, code)


def test_best_model_is_final_or_said_to_be_lost(zygote: Zygote, tmp_path: Path) -> None:
    """No later evaluation is so much better that it counts."""
    run = tmp_path / "run"
    more = ("training.max_steps=4", "checkpoint.final=best", "eval.min_delta=100")
    command = (*SMALL, *more, f"output_dir={run}", "resume=auto")
    ends = []
    for lost in (False, True):
        if lost:
            shutil.rmtree(run / "checkpoints" / "step-000002")
        ended = zygote.run(tmp_path, *command, code=0)
        assert ("checkpoint.final=best: the checkpoint of step 2" in ended.stdout) == lost
        ends.append(result(run))
    best, last = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line and line["step"]]
    assert best != last
    assert [(end["objective"], end["final_metrics"]["eval_loss"]) for end in ends] == [(best, best), (last, last)]
