"""Killed runs and runs out of memory resume with the same numbers."""

import json
import os
import random
import shlex
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.command import test_auto_format, test_new_tokens
from tests.command.test_processes import PLAIN, with_rate
from tests.command.test_resume import BRIEF, HUP, INT, KILL, TERM, Row, check_resumed
from tests.command.test_scarce_memory import FEW, LIMITS, PADDED, SCARCE, told
from tests.conftest import RunApp
from tests.full.command import test_classification, test_masked
from tests.full.command.test_classification import encoder_tokenizer, write
from tests.full.command.test_composites import composite, mixture
from tests.full.command.test_mixers import HYBRIDS
from tests.harness.runs import (
    FINISHED,
    SMALL,
    Ended,
    FinishedRuns,
    Zygote,
    content_of,
    has_reached,
    losses,
    metrics,
    result,
    same_ending,
    same_numbers,
    tensors,
)
from tests.model.small import distance
from tests.training.test_message_weights import WEIGHTS, chats
from tests.training.test_train_step import files

OFTEN = ("checkpoint.every=2", "eval.every=4", "training.epochs=4", "training.max_steps=10")
_ROWS = tuple(word for word in BRIEF if not word.startswith("model."))


def labels(place: Path) -> tuple[str, ...]:
    choose = random.Random(0)
    write(place / "pairs.jsonl", [test_classification.pair(choose, i) for i in range(60)])
    encoder_tokenizer(place / "tokenizer")
    return (*test_classification.ENCODER, *OFTEN)


def tags(place: Path) -> tuple[str, ...]:
    choose = random.Random(0)
    write(place / "names.jsonl", [test_classification.sentence(choose) for _ in range(80)])
    encoder_tokenizer(place / "tokenizer")
    return (*test_classification.GIVEN, *OFTEN)


def hidden_tokens(place: Path) -> tuple[str, ...]:
    test_masked.write_days(place)
    return (*test_masked.SMALL, *OFTEN)


def messages(place: Path) -> tuple[str, ...]:
    write(place / "chat.jsonl", chats(WEIGHTS))
    rows = ("dataset=messages", "dataset.path=chat.jsonl", "dataset.eval_fraction=0.3", "dataset.max_length=128")
    return (*BRIEF, *rows, "batching.tokens=128", "training.epochs=4")


def added_tokens(place: Path) -> tuple[str, ...]:
    test_new_tokens.write_calls(place)
    return (*test_new_tokens.SHIPPED, *OFTEN, "record.every=1")


def talks(place: Path) -> tuple[str, ...]:
    test_auto_format.write_talks(place)
    return (*BRIEF, *test_auto_format.ROWS, "eval.at_start=true", "training.epochs=4")


def gemma3(place: Path) -> tuple[str, ...]:
    return (*_ROWS, "model=folder", f"model.path={composite('gemma3', place / 'base')}")


def qwen3_vl(place: Path) -> tuple[str, ...]:
    return (*_ROWS, "model=folder", f"model.path={composite('qwen3_vl', place / 'base')}")


def qwen3_5_moe(place: Path) -> tuple[str, ...]:
    return (*_ROWS, "model=folder", f"model.path={mixture('qwen3_5_moe', place / 'base')}")


def gpt_oss(place: Path) -> tuple[str, ...]:
    return (*_ROWS, "model=folder", f"model.path={mixture('gpt_oss', place / 'base')}")


KILLS = ((KILL, 1), (KILL, 4), (KILL, 6))  # before the first checkpoint, and in both epochs
BLOOM = "model.architecture.model_type=bloom"
TIED = "model.architecture.tie_word_embeddings=true"
EXPERTS = "recipe=qlora adapter.experts=true adapter.r=4 task.router_loss=0.01"
BF16 = "precision=bf16 precision.trained=bf16"
DROPOUT = "adapter.dropout=0.1"
# one batch of held-out rows, so that one of several processes has none
WIDE = "model.architecture.hidden_size=192 model.architecture.intermediate_size=512 dataset.eval_max_rows=2"
LONG = "training.epochs=4 batching.accumulation=1"  # steps of several processes

ROWS = [
    # schedules, layouts and layers
    Row("", ((TERM, 3), (INT, 7))),
    Row("recipe=full precision=fp16 model.architecture.initializer_range=0.3", ((HUP, 7),)),
    Row("recipe=full precision=bf16 model.norm=low model.architecture.model_type=gpt_neox"),
    Row(f"recipe=lora {BLOOM}"),
    *(
        Row(f"recipe={recipe} training.recompute=1 {' '.join(HYBRIDS[kind])}")
        for kind, recipe in (("qwen3_5_text", "qlora"), ("bamba", "full"))
    ),
    # optimizers
    Row("recipe=full optimizer=adamw_8bit optimizer.embedding_states=32bit batching.packing=false", KILLS),
    Row("recipe=qlora optimizer=paged_adamw_8bit training.recompute=true training.tile=24", KILLS),
    Row("recipe=full optimizer=adamw optimizer.implementation=foreach"),
    Row("recipe=full optimizer=sgd optimizer.implementation=loop"),
    Row("recipe=full optimizer=adamw_bnb_32bit"),
    Row("recipe=full optimizer=muon batching.packing=false"),
    Row(f"recipe=full optimizer.in_backward=true training.clip=0 batching.accumulation=1 batching.tokens=128 {BF16}"),
    # quantizations
    Row("recipe=full quantization=qat"),
    Row("recipe=lora quantization=fp8"),
    Row("recipe=lora quantization=int8"),
    Row("recipe=lora quantization=llm_int8 training.recompute=1"),
    # adapters
    Row(f"recipe=lora adapter.lr_ratio=16 adapter.init=gaussian adapter.train_tokens=[5,7,30] {TIED}"),
    Row("recipe=lora adapter.dora=true adapter.rslora=true adapter.train_whole=[lm_head,embed_tokens]"),
    Row("recipe=lora adapter.rank_pattern={q_proj:4} adapter.layers=[1] adapter.train_whole=[model.norm]"),
    Row(f"recipe=lora adapter.init=orthogonal adapter.train_whole=[embed_tokens] {TIED}"),
    Row("recipe=lora adapter.init=pissa adapter.rslora=true adapter.rank_pattern={q_proj:4}"),
    Row("recipe=lora adapter.init=pissa_niter_4 adapter.train_tokens=all"),
    Row("recipe=lora adapter.init=olora adapter.alpha_pattern={q_proj:8}"),
    Row("recipe=lora adapter.init=eva adapter.rank_pattern={q_proj:4}"),
    Row("recipe=lora adapter.init=corda adapter.rslora=true adapter.rank_pattern={q_proj:4}"),
    Row("recipe=qlora adapter.init=loftq"),
    Row("recipe=lora adapter=peft adapter.method=lokr"),
    Row("recipe=lora adapter.train_tokens=new", base=added_tokens),
    # tasks and rows
    Row("recipe=qlora", base=labels),
    Row("recipe=qlora eval.objective=entity_f1", base=tags),
    Row("recipe=lora", base=hidden_tokens),
    Row("recipe=dpo optimizer.lr=5e-3 dataset.max_length=48 batching.tokens=96"),
    Row("recipe=kto training.epochs=3 optimizer.lr=5e-3 dataset.max_length=48 batching.tokens=96"),
    Row("recipe=full optimizer=sgd", base=messages),
    Row("recipe=lora", base=talks),
    # models in folders
    Row("recipe=lora adapter.rank_pattern={self_attn.q_proj:4,q_proj:8}", base=gemma3),
    Row("recipe=lora", base=qwen3_vl),
    Row(EXPERTS, base=qwen3_5_moe),
    Row(EXPERTS, base=gpt_oss),
    # several processes
    Row(f"recipe=full batching.packing=false {LONG}", processes=3),
    Row(f"recipe=qlora training.recompute=true {LONG}", processes=2),
    Row(f"recipe=full parallel=fsdp {WIDE} {LONG}", processes=2),
    Row(f"recipe=qlora parallel=fsdp {DROPOUT} {WIDE} {LONG}", processes=2),
    Row(f"recipe=full parallel=fsdp optimizer=adamw_8bit {BF16} {WIDE} {LONG}", processes=2),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_stopped_run_resumes_bit_for_bit(row: Row, zygote: Zygote, tmp_path: Path) -> None:
    check_resumed(row, zygote, tmp_path)


MODULE = "tests.full.command.file_events"
SHORT = ("dataset.max_rows=24", "dataset.eval_max_rows=4", "training.max_steps=4", "checkpoint.every=2")
EVENTS = ("kill", "kill", "kill", "ENOSPC", "EIO", "EACCES")


@pytest.mark.parametrize(
    "recipe",
    [
        ("recipe=lora", "adapter.dropout=0.1", "batching.accumulation=3"),
        ("recipe=full", "precision=bf16", "precision.trained=bf16"),
        ("recipe=lora", "checkpoint.final=best", "eval.every=1"),
    ],
    ids=lambda recipe: recipe[1],
)
def test_event_at_a_change_of_a_file_resumes_bit_for_bit(zygote: Zygote, tmp_path: Path, recipe: tuple[str]) -> None:
    command = (*SMALL, *SHORT, *recipe, "output_dir=run", "resume=auto")
    folders = [tmp_path / name for name in ("whole", *map(str, range(len(EVENTS))))]
    for folder in folders:
        folder.mkdir()
    whole, *others = folders
    ended = zygote.run(whole, "count", "events", *command, module=MODULE, code=0)
    moments = random.Random(" ".join(recipe)).sample(range(1, int((whole / "events").read_text())), len(EVENTS))
    todo = list(zip(others, EVENTS, moments, strict=True))
    for pair in (todo[i : i + 2] for i in range(0, len(todo), 2)):  # as many as there are cores
        hurt = [zygote.start(folder, what, str(moment), *command, module=MODULE) for folder, what, moment in pair]
        for run, (_, what, moment) in zip(hurt, pair, strict=True):
            check_end(what, moment, run.wait())
        resumed = [zygote.start(folder, *command) for folder, _, _ in pair]
        for run, (folder, what, moment) in zip(resumed, pair, strict=True):
            ended = run.wait()
            assert ended.code == 0, f"{what} {moment}: {ended.stderr}"
            same_ending(whole / "run", folder / "run")


def check_end(what: str, moment: int, ended: Ended) -> None:
    """Some errors are of files that a run can do without."""
    if what == "kill":
        assert ended.code == -signal.SIGKILL
    else:
        assert ended.code in (0, 2), f"{what} {moment}: {ended.stderr}"
        assert "Traceback" not in ended.stdout + ended.stderr, f"{what} {moment}"
        assert ended.stderr.startswith("error: ") == (ended.code == 2)


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
    assert "seed changed from 3 to 0. A resumed run keeps its settings." in refused.stderr
    assert f"finetune train 'from={run}' seed=0" in refused.stderr
    _, typed = refused.stderr.split("To resume:\n")
    assert shlex.split(typed)[2:] == [*words, f"output_dir={run}", "resume=auto"]
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


def test_a_stopped_run_goes_on_in_parts_to_the_last_bit(zygote: Zygote, tmp_path: Path) -> None:
    command = (*SMALL, "recipe=full", "training.max_steps=6", "checkpoint.every=2")
    given = LIMITS | {"WHERE": "forward", "RANKS": "0"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert zygote.run(tmp_path, *command, f"output_dir={whole}", module=SCARCE, **given).code == 0
    again = (*command, f"output_dir={stopped}", "resume=auto")
    zygote.run(tmp_path, *again, "training.stop_after=4", module=SCARCE, **given, code=75)
    (state,) = (stopped / "checkpoints").glob("step-000004/state.json")
    assert json.loads(state.read_text())["progress"]["depth"] > 0
    assert zygote.run(tmp_path, *again).code == 0, "with memory enough it keeps to its parts"
    same_ending(whole, stopped)


def test_a_device_that_cannot_hold_the_model_at_all(zygote: Zygote, tmp_path: Path) -> None:
    given = LIMITS | {"WHERE": "forward", "RANKS": "0", "TOKENS": "0", "CALLS": "0"}
    ended = zygote.run(tmp_path, *SMALL, "output_dir=run", module=SCARCE, **given, code=2)
    assert "error: out of memory: a check of the model on " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("where", "ranks", "more"),
    [
        ("forward", "0", "batching.packing=false"),
        ("recomputed", "01", "training.recompute=true"),
        ("backward", "1", "parallel=ddp"),
    ],
)
def test_one_of_two_processes_runs_out_of_memory(
    zygote: Zygote, tmp_path: Path, where: str, ranks: str, more: str
) -> None:
    command = (*SMALL, *PLAIN, "recipe=lora", more, "training.max_steps=4", with_rate(2))
    enough, scarce = tmp_path / "enough", tmp_path / "scarce"
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={enough}")
    calls = {"forward": "32", "recomputed": "40", "backward": "20"}[where]
    given = LIMITS | {"WHERE": where, "RANKS": ranks, "CALLS": calls}
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={scarce}", module=SCARCE, **given)
    parts = [int(line.partition("up to ")[2].split()[0]) for line in told(scarce)]
    assert parts
    assert parts[0] in (2, 4)
    assert parts == sorted(set(parts)), "each depth is told once, whichever process reached it first"
    assert told(enough) == []
    same_numbers(enough, scarce, 2e-6)
    assert distance(tensors(scarce), tensors(enough)) <= 1e-6


def test_rehearsal_of_two_processes_changes_no_byte(zygote: Zygote, tmp_path: Path) -> None:
    """Mid-epoch, with dropout: each start rehearses, and both processes take part in its reduction."""
    command = (*FEW, "recipe=lora", "adapter.dropout=0.1", "batching.accumulation=1")
    plain, tried = tmp_path / "plain", tmp_path / "tried"
    zygote.finish_together(tmp_path, 2, *command, f"output_dir={plain}")
    again = (*command, "training.rehearse=true", "resume=auto", f"output_dir={tried}")
    for code, more in ((75, ("training.stop_after=2",)), (0, ())):
        for ended in zygote.run_together(tmp_path, 2, *again, *more):
            assert (ended.code, ended.stderr) == (code, "")
    same_ending(plain, tried)
    names = ("weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")
    saves = [files(run / "checkpoints" / "step-000004") for run in (plain, tried)]
    assert all(saves[0][name] == saves[1][name] for name in names)
    assert [line.partition("): ")[2] for line in told(tried, "rehearsed")] == ["fits", "fits"]
    assert told(plain, "rehearsed") == []
    assert json.loads((tried / "manifest.json").read_text())["rehearsal"]["depth"] == 0


def test_one_of_two_processes_learns_before_the_first_step_that_memory_is_short(zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = (*FEW, *PADDED, "batching.accumulation=1", "training.rehearse=true", f"output_dir={run}")
    given = {"WHERE": "backward", "RANKS": "1", "TOKENS": "150", "CALLS": "0"}
    zygote.finish_together(tmp_path, 2, *command, module=SCARCE, **given)
    (line,) = told(run, "rehearsed")
    assert "fits only in parts: micro-batches are split by document from the first step" in line
    log = (run / "log.txt").read_text()
    assert "out of memory. From now on micro-batches" not in log, "no step has to learn it"
    state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["progress"]["depth"] > 0


def test_rehearsal_out_of_memory_ends_the_run_early(zygote: Zygote, tmp_path: Path) -> None:
    given = {"WHERE": "backward", "RANKS": "0", "TOKENS": "3", "CALLS": "32"}
    words = (*FEW, *PADDED, "training.rehearse=true", "output_dir=run")
    ended = zygote.run(tmp_path, *words, module=SCARCE, **given, code=2)
    assert "error: out of memory: a single document of" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "step 1/" not in ended.stdout
    assert result(tmp_path / "run")["status"] == "failed"


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
