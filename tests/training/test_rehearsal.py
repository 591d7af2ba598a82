"""A rehearsal of the largest micro-batch: what does not fit is found before the first step; nothing else is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from app.errors import EnvironmentProblem
from app.layers.activation_checkpointing import recompute_rest
from app.model.training_model import TrainingModel
from app.signals import StopRequest
from app.training.summary import rehearsal_message
from app.training.train_step import Rehearsal, is_due, rehearse
from app.training.trainer import Trainer
from tests.harness.runs import CLOCKS
from tests.harness.scarcity import WHERE, scarce
from tests.training.conftest import MakeLoop, Notebook, small_run

STEPS = 3
LITTLE = ("precision=bf16", "precision.trained=bf16", "optimizer.in_backward=true", "training.clip=0")
EVERYTHING = ("eval.every=2", "checkpoint.every=2", "checkpoint.keep=9", "record.every=1")


def rehearsed(loop: Trainer, micro_batches: int = 1) -> Rehearsal:
    parts = loop.parts
    found = rehearse(parts.stepper, parts.runtime, parts.loader.largest(), micro_batches, parts.try_evaluation)
    loop.progress.depth = found.depth
    return found


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def ended(made: tuple[Trainer, Notebook], folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """All numbers of a run, and all bytes of its checkpoints."""
    loop, notebook = made
    assert loop.fit(StopRequest())
    lines = [{k: v for k, v in line.items() if k not in CLOCKS} for line in notebook.steps]
    return [*lines, *notebook.evaluations], files(folder)


@pytest.mark.parametrize(
    "settings",
    [
        ("recipe=full", "optimizer=muon"),
        ("recipe=full", "optimizer=paged_adamw_8bit", *LITTLE),
        ("recipe=lora", "adapter.dropout=0.2"),
        ("recipe=full", "precision=fp16"),
        ("recipe=qlora", "training.recompute=true"),
    ],
    ids=lambda settings: "-".join(word.partition("=")[2] for word in settings),
)
def test_rehearsal_changes_no_number_and_no_checkpoint(
    settings: tuple[str, ...], make_loop: MakeLoop, folder: Path
) -> None:
    check_rehearsal(make_loop, folder, *settings)


def check_rehearsal(make_loop: MakeLoop, folder: Path, *settings: str) -> None:
    run = small_run(*settings, *EVERYTHING)
    torch.manual_seed(5)
    plain = make_loop(run, STEPS)
    torch.manual_seed(5)
    expected, saved = ended(plain, folder)
    for file in sorted(folder.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    torch.manual_seed(5)
    made = make_loop(run, STEPS)
    torch.manual_seed(5)
    found = rehearsed(made[0], micro_batches=2)
    assert (found.depth, found.deepened, found.evaluated) == (0, False, True)
    assert ended(made, folder) == (expected, saved)
    assert any("optimizer" in name for name in saved)


def test_rehearsal_keeps_restored_optimizer_states(make_loop: MakeLoop) -> None:
    loop, _ = make_loop(small_run("recipe=lora", "eval.every=0", "checkpoint.every=0"), 2)
    loop.fit(StopRequest())
    state = loop.parts.stepper.optimizer.state
    before = {p: {name: value.clone() for name, value in each.items()} for p, each in state.items()}
    rehearsed(loop)
    assert before
    for parameter, each in before.items():
        assert all(torch.equal(state[parameter][name], value) for name, value in each.items())


@pytest.mark.parametrize("where", WHERE)
def test_rehearsal_out_of_memory_splits_before_step_one(where: str, make_loop: MakeLoop) -> None:
    run = small_run("recipe=lora", f"training.recompute={str(where == 'recomputed').lower()}", *EVERYTHING)
    loop, notebook = make_loop(run, STEPS)
    tokens = int(0.8 * loop.parts.loader.largest().ids.numel())
    with scarce(where, tokens) as memory:
        found = rehearsed(loop)
        assert (found.depth, found.deepened) == (1, True)
        assert memory.times >= 1
        before = memory.times
        loop.fit(StopRequest())
    if where == "forward":  # evaluations try each of their batches whole
        assert memory.times - before <= 2 * len(notebook.evaluations)
    else:
        assert memory.times == before, "no step runs out of memory any more"
    told = rehearsal_message(found)
    assert "rehearsed a step and an evaluation" in told
    assert "fits only in parts: from the first step on micro-batches are split by documents" in told


def test_rehearsal_recomputes_more_layers_before_it_splits(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    loop, _ = make_loop(small_run("recipe=lora", "training.recompute=1", "eval.every=0", "checkpoint.every=0"), STEPS)
    stepper, own = loop.parts.stepper, cast("Any", LlamaAttention.__call__)
    more: list[int] = []

    def recompute_more() -> int:
        more.append(recompute_rest(stepper.model.network, 1))
        return more[0]

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not more:
            raise torch.OutOfMemoryError
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "__call__", limited)  # a module of a run may have a forward of its own
    stepper.recompute_rest = recompute_more
    found = rehearsed(loop)
    assert (found.depth, found.deepened, found.recomputed_more) == (0, False, 1)
    assert rehearsal_message(found).endswith("it fits, with 1 more layer recomputed than planned")
    assert loop.fit(StopRequest())
    assert stepper.split_depth == 0


def test_rehearsal_finds_evaluation_that_does_not_fit(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = make_loop(small_run("recipe=lora"), STEPS)

    def scores(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TrainingModel, "scores", scores)
    with pytest.raises(EnvironmentProblem, match=r"a document of \d+ tokens by itself, in an evaluation"):
        rehearsed(loop)
    assert loop.progress.step == 0


def test_rehearsal_finds_states_that_do_not_fit(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = make_loop(small_run("recipe=full", "optimizer=adafactor"), STEPS)

    def step(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(loop.parts.stepper.optimizer, "step", step)
    with pytest.raises(EnvironmentProblem, match="the step of the optimizer does not fit"):
        rehearsed(loop)


def test_rehearsal_is_due_on_gpu_or_when_asked() -> None:
    asked: Callable[[str], Any] = lambda word: small_run(f"training.rehearse={word}").training  # noqa: E731
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [is_due(asked(word), cpu) for word in ("auto", "true", "false")] == [False, True, False]
    assert [is_due(asked(word), gpu) for word in ("auto", "true", "false")] == [True, True, False]
