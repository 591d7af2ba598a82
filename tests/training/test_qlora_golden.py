"""A small QLoRA run whose losses are known: a CPU gives them in fp32, a GPU in bf16 with its own kernels comes near."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch

from app.base.base_model import load_base
from app.base.base_weights import LoadOptions
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.data.collate import Packed
from app.data.loader import Loader, StepSplit
from app.data.prepare import Data
from app.distributed.process_group import start
from app.layers.attention import register, select
from app.model.build import build_training_model
from app.model.training_model import TrainingModel
from app.tasks.table import loss_of
from app.training.setup import stepper_of
from tests.training.conftest import needs_for, sections_of, small_run

GOLDEN = json.loads((Path(__file__).parent / "golden_qlora.json").read_text())
TOKENS, LR = 256, 1e-3
EPOCH = 5  # steps


def run_on_a_saved_base(folder: Path, *overrides: str) -> RunConfig:
    """Random weights, drawn on the CPU wherever the run is going to be."""
    run = small_run("recipe=qlora", "model.architecture.initializer_range=0.2", *overrides)
    cpu, task = torch.device("cpu"), TASKS["causal"]
    load_base(run.model, task, LoadOptions(torch.float32, cpu, register("sdpa")), 0).save_pretrained(str(folder))
    return replace(run, model=replace(run.model, path=str(folder), weights="pretrained"))


def begin_alike(model: TrainingModel) -> None:
    """Adapters too are drawn on the device they live on, so they are drawn again here."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.trained().items():
        if ".lora_A." in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def losses(run: RunConfig, data: Data) -> list[float]:
    runtime = start(run.launch, run.precision.kind, run.seed)
    attention = select(run.attention, runtime.device, lambda: needs_for(run))
    model = build_training_model(sections_of(run, attention), loss_of(run), runtime.device, run.seed, "nowhere")
    begin_alike(model)
    stepper = stepper_of(model, run, runtime, run.precision.kind)
    loader = Loader(data.train, Packed(TOKENS, pad_id=0, max_length=TOKENS), StepSplit(1), seed=0)
    assert loader.steps_per_epoch == EPOCH
    by_step = []
    for step in range(len(GOLDEN)):
        result = stepper.run(loader.batches(step), LR)
        by_step.append(float(result.loss_sum) / result.labels)
    return by_step


def test_qlora_losses_on_cpu_are_golden(tmp_path: Path, data: Data) -> None:
    by_step = losses(run_on_a_saved_base(tmp_path), data)
    assert by_step == pytest.approx(GOLDEN, rel=1e-4)
    first, second = (mean(by_step[at : at + EPOCH]) for at in (0, EPOCH))  # the same rows in both
    assert second < 0.95 * first
