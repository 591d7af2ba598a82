"""Unsloth: its model with the same weights, in TRL's trainer with packing, as in its guides.

Importing Unsloth replaces parts of transformers, PEFT and TRL, so it must be imported before this module and in its own
process. It only reads models from folders with a tokenizer, so the random base is written to one.
"""

import tempfile
from typing import Any

import torch

from app.adapters.adapters import layers_to_adapt
from app.base.base_model import load_base
from app.base.base_weights import LoadOptions
from app.base.tokenizer import load_tokenizer
from app.config.tasks import TASKS
from app.model.build import DTYPES
from scripts.bench.contest import Contest
from scripts.bench.loops import BASE, PACKED, Prepared, prepare
from scripts.bench.machine import Clock
from scripts.bench.with_trl import Trl


class Unsloth:
    """Fused layers and kernels of Unsloth with PEFT adapters."""

    layout = PACKED
    attention = "its own"

    def __init__(self, contest: Contest, settings: tuple[str, ...]) -> None:
        prepared = prepare(contest, settings)
        with tempfile.TemporaryDirectory() as folder:
            names = _write_base(prepared, folder)
            self.network: Any = _adapted(prepared, folder, names)
        _start_like_ours(prepared, self.network)
        self._trainer = Trl(prepared, self.network, self.attention, PACKED)

    def train(self, clock: Clock) -> None:
        """Train with TRL's trainer as changed by Unsloth."""
        self._trainer.train(clock)


def _write_base(prepared: Prepared, folder: str) -> list[str]:
    """Write the initial weights of ours, and a tokenizer; return the names of adapted layers."""
    run, device = prepared.run, prepared.runtime.device
    task, dtype = TASKS[run.task.kind], DTYPES[prepared.choices.precision].base
    lm = load_base(run.model, task, LoadOptions(dtype, device, "sdpa"), run.seed)
    lm.save_pretrained(folder)
    load_tokenizer(run.model, needs_template=False).save_pretrained(folder)
    return sorted({name.rpartition(".")[2] for name in layers_to_adapt(run.adapter.targets, lm)})


def _adapted(prepared: Prepared, folder: str, names: list[str]) -> Any:
    from unsloth import FastLanguageModel

    run, contest = prepared.run, prepared.contest
    lm, _ = FastLanguageModel.from_pretrained(
        folder,
        max_seq_length=contest.bin_tokens,
        dtype=DTYPES[prepared.choices.precision].base,
        load_in_4bit=run.quantization.kind == "nf4",
    )
    return FastLanguageModel.get_peft_model(
        lm,
        r=run.adapter.r,
        lora_alpha=run.adapter.alpha,
        lora_dropout=0.0,
        target_modules=names,
        use_gradient_checkpointing="unsloth" if contest.recompute else False,
        random_state=run.seed,
    )


def _start_like_ours(prepared: Prepared, network: Any) -> None:
    """Draw lora_A in the order of the layers from the same seed, as `app.adapters.adapters` does."""
    from app.adapters.adapters import add_adapter
    from app.base.base_model import BaseModel

    run = prepared.run
    with torch.device(prepared.runtime.device):
        template = BaseModel(run.model, TASKS[run.task.kind]).on_meta()
        torch.manual_seed(run.seed)
        drawn = dict(add_adapter(run.adapter, TASKS[run.task.kind], template, BASE).named_parameters())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and not drawn[name].is_meta:
                parameter.copy_(drawn[name])
