"""The training step of this program and plain PyTorch loops, with equal documents and weights for all contenders."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from app.adapters.adapters import add_adapter
from app.base.base_model import BaseModel, load_base
from app.base.base_weights import LoadOptions
from app.batch import IGNORE, Batch
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.data.collate import BinShape, collate_packed, collate_padded
from app.data.objectives import label_next_tokens
from app.distributed.process_group import Runtime, start
from app.errors import gist
from app.layers.attention import register
from app.layers.compile import CompiledLayers
from app.layers.quantization import quantizer_of
from app.memory.estimate import machine_of, plan_memory
from app.memory.planner import Planner
from app.memory.trace import Shape
from app.model.build import DTYPES, build_training_model, choose_loss_head
from app.model.training_model import TrainingModel
from app.model.verification import mean_errors, verify_compiled
from app.tasks.table import loss_of
from app.training.auto_settings import AUTO, Choices, choose, sections_of, with_planned_compile
from app.training.setup import stepper_of
from scripts.bench.contest import Contest, run_of
from scripts.bench.machine import Clock
from scripts.bench.workload import Bin, Step, workload

PAD = 0
BASE = "base"  # base name in an adapter
BINS, PACKED, PADDED = "bins", "packed", "padded"  # layout of a micro-batch


class Contender(Protocol):
    """Built by one of FRAMEWORKS, ready for the first step."""

    network: nn.Module
    attention: str
    layout: str  # BINS are padded to their full length, PACKED rows are as long as their documents

    def train(self, clock: Clock) -> None:
        """Run all steps, marked on the clock; they include reading and collating the documents."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Settings and documents, the same for all contenders."""

    contest: Contest
    run: RunConfig
    choices: Choices  # precision, and attention if it is ours
    runtime: Runtime
    steps: list[Step]

    @property
    def compute(self) -> torch.dtype | None:
        """Autocast dtype; None if everything is float32."""
        return DTYPES[self.choices.precision].compute


def prepare(contest: Contest, settings: tuple[str, ...] = ()) -> Prepared:
    """Prepare a contest; `settings` are those of a variant of ours."""
    run = run_of(contest, settings)
    base = BaseModel(run.model, TASKS[run.task.kind])
    run = with_planned_compile(run, base.on_meta(), "gpu" if contest.device == "cuda" else "cpu")
    choices = choose(run, base, {})
    runtime = start(run.launch, choices.precision, run.seed)
    assert runtime.device.type == contest.device, f"{contest.device} is not available"
    steps = workload(contest, run.model.architecture["vocab_size"])
    return Prepared(contest, run, choices, runtime, steps)


def network_of(prepared: Prepared, attention: str) -> Any:
    """Return the weights of our model, including adapters, as a transformers and PEFT model."""
    run, device, seed = prepared.run, prepared.runtime.device, prepared.run.seed
    dtypes, task = DTYPES[prepared.choices.precision], TASKS[run.task.kind]
    packing = quantizer_of(run.quantization, dtypes.compute or dtypes.base)
    dtype = dtypes.base if packing is not None or run.adapter.kind != "none" else torch.float32
    lm = load_base(run.model, task, LoadOptions(dtype, device, attention), seed, packing)
    torch.manual_seed(seed)
    network: Any = add_adapter(run.adapter, task, lm, BASE).to(device)
    network.train()
    return network


def recompute_as_transformers(network: Any) -> None:
    """Enable gradient checkpointing as in transformers."""
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network.enable_input_require_grads()


def labels_of(packed: Bin) -> list[Tensor]:
    """Return the labels of each document: its IDs where they are in the loss."""
    return [torch.where(torch.from_numpy(doc.trained), torch.from_numpy(doc.ids).long(), IGNORE) for doc in packed]


def ids_of(packed: Bin) -> list[Tensor]:
    """Return the token IDs of each document."""
    return [torch.from_numpy(document.ids).long() for document in packed]


def positions_in(step: Step, layout: str, bin_tokens: int) -> int:
    """Return the number of positions computed in a step, including padding."""
    if layout == BINS:
        return bin_tokens * len(step)
    if layout == PADDED:
        return sum(max(map(len, packed)) * len(packed) for packed in step)
    return sum(len(document) for packed in step for document in packed)


class Ours:
    """`app.training.train_step` on batches of `app.data.collate`."""

    def __init__(self, prepared: Prepared) -> None:
        device, collate = prepared.runtime.device, Collator(prepared)
        pinned = Batch.pinned if device.type == "cuda" else lambda batch: batch
        self._batches = [[pinned(collate(packed)) for packed in step] for step in prepared.steps]
        self._prepared, first = prepared, self._batches[0][0]
        self._shape = Shape.of(first, prepared.contest.accumulation)
        planner = Planner(machine_of(None), choices=prepared.choices)
        run = prepared.run
        if run.training.recompute == AUTO:
            run = planner.of_batch(run, self._shape).run
        self.recomputed, self._run = run.training.recompute, run
        model = build_training_model(sections_of(run, prepared.choices), loss_of(run), device, run.seed, BASE)
        self._stepper = stepper_of(model, run, prepared.runtime, prepared.choices.precision)
        choose_loss_head(model, first.to(device))
        self.verified: dict[str, Any] | None = None
        if model.compiled_layers is not None:
            self.verified = verify_layers(model, model.compiled_layers, first.to(device))
        self.network: nn.Module = model.network
        self.attention = prepared.choices.attention
        self.layout = BINS if run.batching.packing else PADDED

    def train(self, clock: Clock) -> None:
        """Run the steps of `app.training.trainer`, without logging."""
        clock.begin()
        for batches in self._batches:
            result = self._stepper.run(batches, self._prepared.run.optimizer.lr)
            clock.mark(result.loss_sum / result.labels)

    def planned_bytes(self) -> int:
        """Return the estimated peak memory of these steps."""
        device = "gpu" if self._prepared.contest.device == "cuda" else "cpu"
        choices = self._prepared.choices
        return plan_memory(self._run, self._shape, device, choices=choices, steps_only=True).peak_bytes


def verify_layers(model: TrainingModel, layers: CompiledLayers, batch: Batch) -> dict[str, Any]:
    """Return the result of the verification; layers that fail it run without the compiler, as in training."""
    start = time.perf_counter()
    try:
        comparison = verify_compiled(model, layers, batch)
        comparison.or_leave(layers.give_up)
        result = str(comparison)
    except Exception as fault:  # noqa: BLE001  such as out of memory; the steps are measured anyway
        result = f"{type(fault).__name__}: {gist(fault)}"
        layers.give_up(result)
    on_gpu = batch.ids.is_cuda
    return {
        "result": result,
        "measured": "compiled layers" if layers.is_on else "compile=none, because the verification failed",
        "graphs": layers.graphs,
        "compile_seconds": round(layers.seconds, 3),
        "seconds": round(time.perf_counter() - start, 3),
        "reserved_bytes": torch.cuda.max_memory_reserved(batch.ids.device) if on_gpu else None,
        "worst_ratio": _finite(layers.worst_ratio),
        "mean_errors": {layer.name: [*map(_finite, layer[2:])] for layer in mean_errors(layers.errors)},
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None  # JSON has no NaN


class Collator:
    """Converter of documents to our batches: bins of constant shape, or padded rows."""

    def __init__(self, prepared: Prepared) -> None:
        self._packing = prepared.run.batching.packing
        tokens, longest = prepared.contest.bin_tokens, prepared.run.dataset.max_length
        bins = [packed for step in prepared.steps for packed in step]
        places = max(len(packed) + -(-(tokens - sum(map(len, packed))) // longest) for packed in bins)
        self._shape = BinShape(tokens, longest, places)

    def __call__(self, packed: Bin) -> Batch:
        rows = [label_next_tokens(document.ids, document.trained) for document in packed]
        return collate_packed(rows, PAD, self._shape) if self._packing else collate_padded(rows, PAD)


Loss = Callable[[Bin], Tensor]  # sum over the labels of a micro-batch


class Plain:
    """Plain PyTorch loop; `layout` selects the loss function of a micro-batch."""

    def __init__(self, prepared: Prepared, network: nn.Module, attention: str, layout: str) -> None:
        self._prepared = prepared
        self.attention = attention
        self.layout = layout
        self.network = network
        self.device = prepared.runtime.device
        if prepared.contest.recompute:
            recompute_as_transformers(self.network)
        self._losses: dict[str, Loss] = {PACKED: self._packed, BINS: self._bare}
        self._collate = Collator(prepared)

    def train(self, clock: Clock) -> None:
        """Forward, backward, clip, step."""
        run, loss_of = self._prepared.run, self._losses[self.layout]
        trained = [p for p in self.network.parameters() if p.requires_grad]
        settings = run.optimizer
        optimizer = torch.optim.AdamW(
            trained,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        clock.begin()
        for step in self._prepared.steps:
            labels = sum(int(document.trained.sum()) for packed in step for document in packed)
            total = torch.zeros((), device=self.device)
            optimizer.zero_grad(set_to_none=True)
            for packed in step:
                with self._autocast():
                    loss = loss_of(packed)
                (loss / labels).backward()
                total += loss.detach()
            if run.training.clip > 0:
                nn.utils.clip_grad_norm_(trained, run.training.clip)
            optimizer.step()
            clock.mark(total / labels)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        compute = self._prepared.compute
        if compute is None:
            return contextlib.nullcontext()
        autocast: contextlib.AbstractContextManager[None] = torch.autocast(self.device.type, dtype=compute)
        return autocast

    def _packed(self, packed: Bin) -> Tensor:
        """Return the loss of a row with positions restarting per document, which transformers uses to isolate them."""
        ids = torch.cat(ids_of(packed))[None].to(self.device)
        labels = torch.cat(labels_of(packed)).to(self.device)
        positions = torch.cat([torch.arange(len(document)) for document in packed])[None].to(self.device)
        logits = self.network(input_ids=ids, position_ids=positions, use_cache=False).logits
        return _cross_entropy(logits[0, :-1], labels[1:])

    def _bare(self, packed: Bin) -> Tensor:
        """Return the loss computed as in our step: our bins and attention, and only labeled rows in the head."""
        batch = self._collate(packed).to(self.device)
        unwrap = getattr(self.network, "get_base_model", None)
        lm: Any = self.network if unwrap is None else unwrap()
        hidden = lm.base_model(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=False, documents=batch.documents
        )[0]
        rows = hidden[0].index_select(0, batch.label_rows)
        return _cross_entropy(lm.get_output_embeddings()(rows), batch.targets)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def packed(prepared: Prepared) -> Plain:
    """Return a loop with packed documents, separated by position, and the attention of transformers."""
    return Plain(prepared, network_of(prepared, "sdpa"), "sdpa", PACKED)


def bare(prepared: Prepared) -> Plain:
    """Return a loop with the arithmetic of ours and nothing else."""
    name = register(prepared.choices.attention)
    return Plain(prepared, network_of(prepared, name), prepared.choices.attention, BINS)
