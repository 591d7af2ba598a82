"""What every contender finds prepared: the configuration, the documents, the device; and a network of equal weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from app.batch import IGNORE
from app.config.schema import RunConfig
from app.engine.choices import Choices, choose
from app.engine.ground import attention_needs
from app.engine.runtime import Runtime, start
from app.model.adapter import attach
from app.model.dtypes import DTYPES
from app.model.held import Held
from app.model.quantize import packing_of
from app.model.tasks import TASKS
from app.model.weights import load_base, load_packed
from scripts.bench.clock import Clock
from scripts.bench.contest import Contest
from scripts.bench.shapes import run_of
from scripts.bench.workload import Bin, Step, workload

PAD = 0
BASE = "base"  # what an adapter would name as its base
BINS, PACKED, PADDED = "bins", "packed", "padded"  # how a micro-batch is laid out


class Contender(Protocol):
    """Built by one of FRAMEWORKS, ready for its first step."""

    network: nn.Module
    attention: str
    layout: str  # BINS are filled up to their full length, PACKED are as long as their documents

    def train(self, clock: Clock) -> None:
        """All steps, each marked on the clock; reading and collating the documents is a part of them."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The same for all."""

    contest: Contest
    run: RunConfig
    choices: Choices  # of precision, and of attention where it is ours
    runtime: Runtime
    steps: list[Step]

    @property
    def compute(self) -> torch.dtype | None:
        """Of autocast; None: everything is float32."""
        return DTYPES[self.choices.precision].compute


def prepare(contest: Contest, settings: tuple[str, ...] = ()) -> Prepared:
    """`settings` are those of one of our variants."""
    run = run_of(contest, settings)
    choices = choose(run.precision, run.attention, partial(attention_needs, run), {})
    runtime = start(run.launch, choices.precision, run.seed)
    assert runtime.device.type == contest.device, f"{contest.device} was asked for, and there is none"
    steps = workload(contest, run.model.architecture["vocab_size"])
    return Prepared(contest, run, choices, runtime, steps)


def network_of(prepared: Prepared, attention: str) -> Any:
    """The very weights of our own model, adapters included, as transformers and PEFT compute with them."""
    run, device, seed = prepared.run, prepared.runtime.device, prepared.run.seed
    dtypes, task = DTYPES[prepared.choices.precision], TASKS[run.task.kind]
    packing = packing_of(run.quantization, dtypes.compute or dtypes.base)
    if packing is not None:
        lm = load_packed(run.model, task, packing, Held(dtypes.base, device, attention), seed)
    else:
        dtype = dtypes.base if run.adapter.kind != "none" else torch.float32
        lm = load_base(run.model, task, Held(dtype, device, attention), seed)
    torch.manual_seed(seed)
    network: Any = attach(run.adapter, task, lm, BASE).to(device)
    network.train()
    return network


def recompute_as_transformers(network: Any) -> None:
    """Gradient checkpointing as its users switch it on."""
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    network.enable_input_require_grads()


def labels_of(packed: Bin) -> list[Tensor]:
    """Of each document: its ids where they are trained."""
    return [
        torch.where(torch.from_numpy(each.trained), torch.from_numpy(each.ids).long(), IGNORE)
        for each in packed
    ]


def ids_of(packed: Bin) -> list[Tensor]:
    """Of each document."""
    return [torch.from_numpy(each.ids).long() for each in packed]


def positions_in(step: Step, layout: str, bin_tokens: int) -> int:
    """What is computed for a step, padding included."""
    if layout == BINS:
        return bin_tokens * len(step)
    if layout == PADDED:
        return sum(max(map(len, packed)) * len(packed) for packed in step)
    return sum(len(each) for packed in step for each in packed)
