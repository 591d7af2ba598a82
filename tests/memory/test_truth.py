"""Planned peaks against counted peaks of real steps; more cases in tests/full/memory/test_truth.py."""

from dataclasses import replace

import pytest
import torch

from app.adapters import lora_inits
from app.memory.estimate import plan_memory
from app.memory.trace import BEGIN, EVALUATION
from app.model.build import build_training_model
from app.tasks.table import loss_of
from app.training.auto_settings import Choices, sections_of
from app.training.storage_counter import StorageCounter, kept_tensors
from tests.memory.truth import ANSWERS, EXPERTS, PACKED, PADDED, batch_of, counted_peak, counted_peaks, small_run

CPU, NEAR = torch.device("cpu"), 4096
BF16 = ("precision=bf16", "precision.trained=bf16")
IN_BACKWARD = ("optimizer.in_backward=true", "training.clip=0")
EMBEDDING_STATES = ("optimizer=paged_adamw_8bit", "optimizer.embedding_states=32bit")
PADDED_ROWS = "batching.packing=false"


def difference(*overrides: str, micro_batches: int = 1) -> int:
    run = small_run(*overrides)
    shape = replace(PADDED if PADDED_ROWS in overrides else PACKED, micro_batches=micro_batches)
    return plan_memory(run, shape, "cpu").peak_bytes - counted_peak(run, shape)


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full", "training.recompute=0"),
        ("recipe=full", *EMBEDDING_STATES, "training.recompute=1", PADDED_ROWS),
        ("recipe=full", "optimizer=adafactor", "training.recompute=1", *BF16, *IN_BACKWARD),
        ("recipe=lora", "adapter.lr_ratio=16", "precision=fp16", "training.recompute=true"),
        ("recipe=lora", "training.recompute=1", PADDED_ROWS),
        ("recipe=lora", "training.recompute=true", "training.offload=true", "precision=bf16"),
        ("recipe=qlora", "training.recompute=1"),
        (*EXPERTS, "recipe=full", "precision=bf16"),
    ],
    ids=" ".join,
)
def test_plan_equals_counted_step(words: tuple[str, ...]) -> None:
    assert abs(difference(*words)) <= NEAR


@pytest.mark.parametrize(
    "words", [("recipe=dpo",), ("recipe=kto", "adapter=none", "optimizer.lr=1e-3", "precision=bf16")], ids=" ".join
)
def test_plan_of_loss_over_answers_equals_counted_step(words: tuple[str, ...]) -> None:
    """Its head runs twice, before that the KL term of kto takes a pass of its own."""
    run = small_run(*words, "training.recompute=1")
    assert abs(plan_memory(run, ANSWERS, "cpu").peak_bytes - counted_peak(run, ANSWERS)) <= NEAR


def test_plan_of_encoder_equals_counted_step() -> None:
    # attention of encoders treats padding as a document of its own
    shape = replace(PADDED, documents=(50, 14, 40, 24, 20, 44), places=6)
    run = small_run("model=bert", "dataset=text", "dataset.path=none.txt", "recipe=full", PADDED_ROWS, "precision=bf16")
    assert abs(plan_memory(run, shape, "cpu").peak_bytes - counted_peak(run, shape)) <= NEAR


def test_plan_of_several_micro_batches_and_of_evaluation_equals_counted() -> None:
    run, shape = small_run("recipe=lora"), replace(PACKED, micro_batches=3)
    plan = plan_memory(run, shape, "cpu", exact=True)
    in_step, in_evaluation = counted_peaks(run, shape)
    assert abs(plan.peak_bytes - in_step) <= NEAR
    assert abs(plan.phases[EVALUATION] - in_evaluation) <= NEAR


def test_plan_of_the_init_from_inputs_is_near_the_counted_bytes() -> None:
    """Beside base and adapter: moments of all layers, and one pass without gradients."""
    run = small_run("recipe=lora", "adapter.init=corda")
    sections = sections_of(run, Choices(run.precision.kind, run.attention.kind))
    model, batch, counter = (
        build_training_model(sections, loss_of(run), CPU, 0, "nowhere"),
        batch_of(PACKED),
        StorageCounter(),
    )
    for kind, tensors in kept_tensors(model, None).items():
        counter.hold(kind, tensors)
    counter.ignore(batch.tensors)
    with counter:
        lora_inits.begin("corda", model, lambda: [batch], list)
    assert lora_inits.moment_bytes("corda", model.network)[0] < counter.peak
    plan = plan_memory(run, PACKED, "cpu")
    assert abs(plan.phases[BEGIN] - counter.peak) <= NEAR
    assert BEGIN not in plan_memory(run, PACKED, "cpu", steps_only=True).phases


def test_plan_of_bf16_weights_and_steps_in_backward_saves_bytes() -> None:
    """bf16 saves 2 bytes per weight and 2 per gradient, stepping in backward the rest of the gradient."""
    plain, bf16, in_backward = (
        plan_memory(small_run("recipe=full", *words), PACKED, "cpu", steps_only=True)
        for words in ((), BF16, BF16 + IN_BACKWARD)
    )
    weights = plain.anatomy["trained_weights"]
    assert plain.kept_bytes - bf16.kept_bytes == pytest.approx(weights, rel=0.01)
    assert bf16.kept_bytes - in_backward.kept_bytes == pytest.approx(weights / 2, rel=0.01)
