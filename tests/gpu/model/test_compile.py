"""Compiled layers on a GPU: real kernels inside a graph, no device syncs, recorded graphs."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from app.batch import Batch, PackedSequences
from app.config.schema import CompileConfig, LaunchConfig, QuantizationConfig
from app.distributed.process_group import start
from app.layers.attention import register
from app.optim.optimizers import build_optimizer
from app.training.train_step import Stepper
from tests.gpu import waiting_is_an_error
from tests.harness.marks import requires_flash_attention
from tests.model import small
from tests.model.small import build_model
from tests.optim.small import section

pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]

BACKENDS = [pytest.param("varlen"), pytest.param("flash", marks=requires_flash_attention)]
STEPS = 6


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    register("sdpa")


def packed(step: int) -> Batch:
    """Batches of one shape with as many labels, and other documents at each step."""
    drawn = random.Random(step)
    apart = [drawn.randrange(1, 20) for _ in range(4)]
    batch = small.packed(small.documents_of(tuple(n for d in apart for n in (40 + d, 40 - d)), seed=step))
    assert batch.documents is not None
    return replace(batch, documents=PackedSequences.from_lengths(batch.documents.lengths, 64, 20))


def losses(
    backend: str,
    compiled: CompileConfig,
    *,
    quietly: bool = False,
    base: QuantizationConfig | None = None,
    tile: int = 0,
) -> list[float]:
    """Losses of a few steps; `quietly`: the last ones must not wait for the device."""
    runtime = start(LaunchConfig(num_processes=1, threads=1), "bf16", seed=0)
    model = small.model_config("llama", architecture=small.wide_numbers("llama"))
    saving = {"tile": tile, "recompute": tile > 0}
    parts = small.sections(model, small.lora(), "bf16", compile=compiled, quantization=base, **saving)
    training_model = build_model(replace(parts, attention=backend), runtime.device, seed=0, base_path="base")
    if training_model.compiled_layers is not None:
        proof = small.verified(training_model, packed(0).to(runtime.device))
        assert proof is not None, training_model.compiled_layers.fault
        # the first layer's input needs no gradient; with tiles: also the sum after the MLP and the tiles
        assert training_model.compiled_layers.graphs == (6 if tile else 2)
    stepper = Stepper(training_model, build_optimizer(section("adamw"), training_model), runtime, 1.0, fp16=False)
    found = [stepper.run([packed(step)], 1e-3) for step in range(STEPS)]
    torch.cuda.synchronize(runtime.device)
    if quietly:
        with waiting_is_an_error():
            for step in range(STEPS, 2 * STEPS):
                stepper.run([packed(step)], 1e-3)
    return [float(each.loss_sum) / each.labels for each in found]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_losses_equal_uncompiled(backend: str, graphs: bool) -> None:
    plain = losses(backend, CompileConfig(kind="none"))
    compiled = losses(backend, CompileConfig(kind="blocks", graphs=graphs), quietly=True)
    assert compiled == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_losses_of_compiled_quantized_layers_equal_uncompiled(kind: str) -> None:
    base = QuantizationConfig(kind=kind, double_quant=kind == "nf4")
    plain = losses("varlen", CompileConfig(kind="none"), base=base)
    compiled = losses("varlen", CompileConfig(kind="blocks"), quietly=True, base=base)
    assert compiled == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("base", [None, QuantizationConfig(kind="nf4", double_quant=True)], ids=["bf16", "nf4"])
def test_losses_of_compiled_tiles_equal_uncompiled_layers(base: QuantizationConfig | None) -> None:
    """With gradient checkpointing: a layer is recomputed up to its MLP, in the thread of the backward pass."""
    plain = losses("varlen", CompileConfig(kind="none"), base=base)
    compiled = losses("varlen", CompileConfig(kind="blocks"), quietly=True, base=base, tile=128)
    assert compiled == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize(
    ("backend", "mode", "graphs"),
    [
        ("inductor", "max-autotune-no-cudagraphs", False),
        ("inductor", "reduce-overhead", True),
        ("inductor", "max-autotune", True),
        ("cudagraphs", "default", True),
    ],
)
def test_losses_of_backends_and_modes_equal_uncompiled(backend: str, mode: str, graphs: bool) -> None:
    plain = losses("varlen", CompileConfig(kind="none"))
    compiled = losses("varlen", CompileConfig(kind="blocks", graphs=graphs, backend=backend, mode=mode))
    assert compiled == pytest.approx(plain, rel=1e-2)
