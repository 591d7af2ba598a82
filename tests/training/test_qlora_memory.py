"""QLoRA with the defaults of its recipe: on a GPU in the size that must fit 24 GB, on a CPU the same code in small."""

from typing import Any

import torch

from app.config.load import compose_run
from app.config.schema import RunConfig
from app.distributed.process_group import start
from app.layers.attention import select
from app.model.build import build_training_model, choose_loss_head
from app.tasks.table import loss_of
from app.training.setup import stepper_of
from app.training.train_step import Stepper
from tests.model.small import documents_of, packed
from tests.training.conftest import needs_for, sections_of

RECIPE = ("recipe=qlora", "model=llama", "model.weights=random", "precision=bf16", "launch.threads=1")
SMALL = (
    "model.architecture.vocab_size=512",
    "model.architecture.hidden_size=64",
    "model.architecture.intermediate_size=128",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2",
    "batching.tokens=64",
    "dataset.max_length=64",
)
CARD = 23e9  # what is left of 24 GB beside the context and the screen


def two_steps(run: RunConfig) -> Stepper:
    """Of a micro-batch as large as the recipe's, every token trained."""
    runtime = start(run.launch, run.precision.kind, run.seed)
    attention = select(run.attention, runtime.device, lambda: needs_for(run))
    model = build_training_model(sections_of(run, attention), loss_of(run), runtime.device, run.seed, "nowhere")
    if runtime.device.type == "cuda":
        assert torch.cuda.max_memory_allocated() < 9e9, "the unpacked base was there as a whole"
    half = run.batching.bin_tokens // 2
    batch = packed(documents_of((half, half)))
    choose_loss_head(model, batch.to(runtime.device))
    assert model.linear is not None
    stepper = stepper_of(model, run, runtime, run.precision.kind)
    before = [p.detach().clone() for p in model.trained().values()]
    for _ in range(2):
        result = stepper.run([batch], 1e-3)
        assert torch.isfinite(result.loss_sum)
        assert not bool(result.skipped)
    pairs = zip(model.trained().values(), before, strict=True)
    assert all(not p.equal(old) for p, old in pairs)
    return stepper


def require_four_bits(stepper: Stepper, layers: int) -> None:
    from bitsandbytes.nn import Linear4bit

    found: list[Any] = [m for m in stepper.model.network.modules() if isinstance(m, Linear4bit)]
    assert len(found) == 7 * layers
    for layer in found:
        assert layer.weight.dtype == torch.uint8
        assert layer.weight.numel() == layer.in_features * layer.out_features / 2
        assert layer.weight.quant_state.nested


def test_qlora_small_run_keeps_four_bits() -> None:
    run = compose_run([*RECIPE, *SMALL])
    assert (run.training.recompute, run.optimizer.kind) == ("auto", "paged_adamw_8bit")
    require_four_bits(two_steps(run), layers=2)
