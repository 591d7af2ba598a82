"""Counted memory of a real step of a small random model."""

from collections.abc import Callable
from dataclasses import replace

import torch

from app.batch import Batch, PackedSequences
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.distributed.process_group import HostGroup, Runtime
from app.memory.trace import Shape
from app.model.build import build_training_model, choose_loss_head
from app.tasks.table import loss_of
from app.training.auto_settings import Choices, sections_of
from app.training.setup import stepper_of
from app.training.storage_counter import StorageCounter, kept_tensors
from tests.harness.composed import composed

SMALL = (
    "model.weights=random",
    "model.architecture.num_hidden_layers=3",
    "model.architecture.hidden_size=128",
    "model.architecture.intermediate_size=192",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "model.architecture.vocab_size=1024",
    "precision=fp32",
    "attention=sdpa",
    "adapter.r=8",
    "eval.rows=3",
    "optimizer=adamw",
)
EXPERTS = (
    "model.architecture.model_type=mixtral",
    "+model.architecture.num_local_experts=4",
    "+model.architecture.num_experts_per_tok=2",
)
DELTA_RULE = (
    "model.architecture.model_type=qwen3_5_text",
    "model.architecture.num_hidden_layers=2",
    "+model.architecture.layer_types=[linear_attention,full_attention]",
    *(f"+model.architecture.linear_{each}" for each in ("num_key_heads=2", "num_value_heads=4", "key_head_dim=16")),
    *("+model.architecture.linear_value_head_dim=32", "+model.architecture.head_dim=32"),
)
STATE_SPACE = (
    "model.architecture.model_type=bamba",
    "+model.architecture.attn_layer_indices=[1]",
    *(f"+model.architecture.mamba_{each}" for each in ("n_heads=4", "d_head=64", "d_state=16", "n_groups=1")),
)
ONE_LAYER = "model.architecture.num_hidden_layers=1"
PACKED = Shape(1, 192, (100, 60, 32), 5, 128, 130)
ANSWERS = Shape(1, 192, (60, 40, 60, 32), 5, 128, 130)
PADDED = Shape(3, 64, (), 0, 64, 110)


def small_run(*overrides: str) -> RunConfig:
    given = {text.partition("=")[0] for text in overrides}
    given |= {"adapter.r"} if {"recipe=full", "adapter=none"} & {*overrides} else set()
    given |= {"model.architecture.num_key_value_heads"} if "model=bert" in overrides else set()
    return composed(*(text for text in SMALL if text.partition("=")[0] not in given), *overrides)


def batch_of(shape: Shape, vocabulary: int = 1024) -> Batch:
    random = torch.Generator().manual_seed(0)
    rows = torch.randperm(shape.tokens, generator=random)[: shape.label_rows].sort().values
    documents = PackedSequences.from_lengths(shape.documents, shape.longest, shape.places) if shape.documents else None
    return Batch(
        ids=torch.randint(vocabulary, (shape.rows, shape.width), generator=random),
        positions=torch.arange(shape.width).expand(shape.rows, -1).contiguous(),
        label_rows=rows,
        targets=torch.randint(vocabulary, (len(rows),), generator=random),
        lengths=shape.documents or (shape.width,) * shape.rows,
        num_labels=len(rows),
        num_tokens=shape.tokens,
        documents=documents,
    )


def of_answers(batch: Batch, answers: int) -> Batch:
    """The same labels for a loss over answers with a reference: of `answers` to a prompt, or of one with a label and
    mismatched ones beside it.
    """
    count = len(batch.lengths)
    starts = torch.tensor(batch.starts)
    found = replace(
        batch,
        rows=(answers,) * (count // answers) if answers > 1 else (),
        document_of_label=torch.searchsorted(starts, batch.label_rows, right=True) - 1,
        document_values=torch.ones(count, 3 - answers, dtype=torch.float64),
    )
    return found if answers > 1 else replace(found, mean_of=(found,))


def counted_peak(run: RunConfig, shape: Shape) -> int:
    """Peak of the second step: the first creates the optimizer states."""
    return counted_peaks(run, shape)[0]


def counted_peaks(run: RunConfig, shape: Shape, runtime: Runtime | None = None, repeats: int = 1) -> tuple[int, int]:
    """Least peaks of `repeats` steps after the first one, and of evaluations after them.

    `runtime`: process group of a sharded run. Gloo's threads may let go of a tensor later than the step does: the least
    of several steps is what the step itself needs.
    """
    runtime = runtime or Runtime(None, torch.device("cpu"), HostGroup(0, 1), 1)
    sections = sections_of(run, Choices(run.precision.kind, run.attention.kind))
    model = build_training_model(sections, loss_of(run), torch.device("cpu"), run.seed, "nowhere")
    choose_loss_head(model, batch_of(shape))
    own = batch_of if model.loss.of_rows is None else lambda s: of_answers(batch_of(s), TASKS[run.task.kind].documents)
    sharding = runtime.sharding(run.parallel)
    if sharding is not None:
        model.divide(sharding)
    stepper = stepper_of(model, run, runtime, sections.precision)
    batches = [own(shape) for _ in range(shape.micro_batches)]
    stepper.run(batches, 1e-3)
    stepper.forget_gradients()
    counter = StorageCounter()
    for kind, tensors in kept_tensors(model, stepper.optimizer).items():
        counter.hold(kind, tensors)
    for batch in batches:
        counter.ignore(batch.tensors)

    def step() -> None:
        stepper.run(batches, 1e-3)
        stepper.forget_gradients()

    def least(before: Callable[[], object], work: Callable[[], object]) -> int:
        found = []
        for _ in range(repeats):
            before()
            counter.peak = counter.current
            work()
            found.append(counter.peak)
        return min(found)

    with counter:
        return least(model.train, step), least(step, lambda: model.eval().scores(batches[0]))
