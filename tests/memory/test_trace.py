"""FLOPs against closed forms, and planned against counted peaks; more in tests/full/memory/test_estimate.py."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.adapters import lora_inits
from app.layers.operations import COSTS
from app.memory.estimate import MemoryPlan, plan_memory
from app.memory.trace import BEGIN, EVALUATION, Shape
from app.model.build import build_training_model
from app.tasks.table import loss_of
from app.training.auto_settings import Choices, sections_of
from app.training.storage_counter import StorageCounter, kept_tensors
from tests.memory.truth import (
    ANSWERS,
    EXPERTS,
    ONE_LAYER,
    PACKED,
    PADDED,
    batch_of,
    counted_peak,
    counted_peaks,
    small_run,
)

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCABULARY = 128, 192, 4, 2, 3, 1024
SIZE = HIDDEN // HEADS
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * SIZE + 3 * HIDDEN * INNER)
FORWARD, WITH_BACKWARD = 2, 6  # FLOPs per weight and token
PADDED_ROWS = "batching.packing=false"


def pairs(lengths: tuple[int, ...]) -> int:
    return sum(n * (n + 1) // 2 for n in lengths)


def rotary_flops(tokens: int) -> int:
    """FLOPs of rotary embeddings, which some versions of transformers compute by a matrix product."""
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS)
    with FlopCounterMode(display=False) as counter:
        LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(tokens)[None])
    return int(counter.get_total_flops())


@cache
def planned(*words: str, shape: Shape = PACKED, device: str = "gpu") -> MemoryPlan:
    """Plan of a step that recomputes no layer."""
    return plan_memory(small_run(*words, "training.recompute=false"), shape, device, steps_only=True)


@pytest.mark.parametrize(("layout", "device"), [("packed", "gpu"), ("padded", "cpu")])
def test_flops_of_full_fine_tuning_equal_closed_form(layout: str, device: str) -> None:
    shape, words = (PACKED, ()) if layout == "packed" else (PADDED, (PADDED_ROWS,))
    plan = planned("recipe=full", *words, shape=shape, device=device)
    attention = LAYERS * (4 + 10) * HEADS * SIZE * pairs(shape.documents or (shape.width,) * shape.rows)
    head = WITH_BACKWARD * VOCABULARY * HIDDEN * shape.label_rows
    assert plan.flops == WITH_BACKWARD * LINEAR * shape.tokens + head + attention + rotary_flops(shape.tokens)
    assert plan.flops_per_token == pytest.approx(plan.flops / shape.tokens)


def test_flops_of_forward_are_a_third_and_recomputed_ones_those_of_layers() -> None:
    plan, recomputed = (
        plan_memory(small_run("recipe=full", f"training.recompute={layers}"), PACKED) for layers in ("false", "true")
    )
    attention = LAYERS * 4 * HEADS * SIZE * pairs(PACKED.documents)
    layers, rotary = FORWARD * LINEAR * PACKED.tokens + attention, rotary_flops(PACKED.tokens)
    head = FORWARD * VOCABULARY * HIDDEN * PACKED.label_rows
    assert plan.forward_flops * PACKED.tokens == layers + head + rotary == recomputed.forward_flops * PACKED.tokens
    assert (plan.recomputed_flops, plan.passes) == (0, 2)
    # no gradient needs the last product of a layer
    repeated = layers - FORWARD * LAYERS * HIDDEN * INNER * PACKED.tokens
    assert recomputed.recomputed_flops * PACKED.tokens == repeated
    assert recomputed.passes == pytest.approx(2 + repeated / (layers + head + rotary))


def test_flops_of_lora_omit_gradients_of_frozen_weights() -> None:
    """4 FLOPs per frozen weight and token; 2 for q, k and v of the first layer, whose input needs no gradient."""
    plan = planned("recipe=lora", "adapter.r=1")
    attention = LAYERS * (4 + 10) * HEADS * SIZE * pairs(PACKED.documents)
    head = 4 * VOCABULARY * HIDDEN * PACKED.label_rows
    base = 4 * LINEAR * PACKED.tokens
    first = FORWARD * (HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * SIZE) * PACKED.tokens
    adapter = 6 * LAYERS * (4 * HIDDEN + 2 * KV_HEADS * SIZE + 2 * HIDDEN + 3 * (HIDDEN + INNER)) * PACKED.tokens
    assert plan.flops == pytest.approx(base - first + head + attention + adapter, rel=0.002)


def test_flops_of_nf4_base_equal_those_of_bf16() -> None:
    plain, nf4 = (planned(f"recipe={kind}", "adapter.r=1") for kind in ("lora", "qlora"))
    assert plain.flops == nf4.flops
    assert plain.peak_bytes > nf4.peak_bytes


def test_flops_of_fp8_base_are_mostly_fp8() -> None:
    plain, fp8 = (planned("recipe=lora", "adapter.r=1", *more) for more in ((), ("quantization=fp8",)))
    assert plain.flops == fp8.flops
    first = FORWARD * (HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * SIZE) * PACKED.tokens
    assert plain.fp8_flops == 0
    assert fp8.fp8_flops == 4 * LINEAR * PACKED.tokens - first


def test_flops_of_optimizer_are_counted_once_per_step() -> None:
    """Muon multiplies matrices, AdamW does not."""
    one, three = (
        planned("recipe=full", "optimizer=muon", shape=replace(PACKED, micro_batches=count)) for count in (1, 3)
    )
    adamw = planned("recipe=full")
    update = one.flops - adamw.flops
    assert update > 0
    assert three.flops == 3 * adamw.flops + update
    assert one.flops_per_token == three.flops_per_token == adamw.flops_per_token


def test_flops_of_experts_count_those_of_a_token() -> None:
    """A token uses two of four experts, and the router scores all four."""
    dense, sparse = planned("recipe=full"), planned("recipe=full", "precision=bf16", *EXPERTS)
    more = LAYERS * (3 * HIDDEN * INNER + 4 * HIDDEN)
    assert sparse.flops - dense.flops == WITH_BACKWARD * more * PACKED.tokens


@pytest.mark.parametrize(
    ("left", "right", "inner"),
    [
        ((12, 8), (4, 8, 16), 8),
        ((4, 16, 8), (8, 12), 8),
        ((16, 12), (12, 8), 3),  # four groups of three rows
        ((4, 12, 8), (4, 8, 16), 8),
    ],
)
def test_flops_of_grouped_product(left: tuple[int, ...], right: tuple[int, ...], inner: int) -> None:
    a, b = torch.ones(left), torch.ones(right)
    ends = None if a.ndim == b.ndim == 3 else torch.tensor([3, 6, 9, 12], dtype=torch.int32)
    out = torch.nn.functional.grouped_mm(a, b, offs=ends)
    assert out.unique().tolist() == [inner]
    count = COSTS["aten::_grouped_mm"].flops
    assert count is not None
    assert count(left, right) == FORWARD * out.numel() * inner


CPU, NEAR = torch.device("cpu"), 4096
BF16 = ("precision=bf16", "precision.trained=bf16")
IN_BACKWARD = ("optimizer.in_backward=true", "training.clip=0")
EMBEDDING_STATES = ("optimizer=paged_adamw_8bit", "optimizer.embedding_states=32bit")


def difference(*overrides: str, micro_batches: int = 1) -> int:
    run = small_run(*overrides)
    shape = replace(PADDED if PADDED_ROWS in overrides else PACKED, micro_batches=micro_batches)
    return plan_memory(run, shape, "cpu").peak_bytes - counted_peak(run, shape)


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full", *EMBEDDING_STATES, "training.recompute=1", PADDED_ROWS),
        ("recipe=full", "optimizer=adafactor", "training.recompute=1", *BF16, *IN_BACKWARD),
        ("recipe=lora", "adapter.lr_ratio=16", "precision=fp16", "training.recompute=true", "training.offload=true"),
        ("recipe=qlora", "training.recompute=1"),
        ("recipe=lora", "training.recompute=1", "training.tile=80"),
        ("recipe=full", "training.recompute=true", "training.tile=80", "precision=bf16"),
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


def test_flops_of_tiles_add_one_forward_pass_of_the_mlp() -> None:
    """With gradient checkpointing too: a recomputed layer stops before its MLP."""
    mlp = FORWARD * LAYERS * 3 * HIDDEN * INNER * PACKED.tokens
    plain, tiled = planned("recipe=full"), planned("recipe=full", "training.tile=64")
    assert tiled.flops - plain.flops == mlp == tiled.recomputed_flops * PACKED.tokens
    words = ("recipe=full", "training.recompute=true")
    plain, tiled = (plan_memory(small_run(*words, *more), PACKED) for more in ((), ("training.tile=64",)))
    of_down = FORWARD * LAYERS * HIDDEN * INNER * PACKED.tokens  # recomputed by tiles alone
    assert (tiled.recomputed_flops - plain.recomputed_flops) * PACKED.tokens == of_down


@pytest.mark.parametrize("words", [(), ("training.tile=80", "training.recompute=true")], ids=" ".join)
def test_plan_of_several_micro_batches_and_of_evaluation_equals_counted(words: tuple[str, ...]) -> None:
    run, shape = small_run("recipe=lora", *words), replace(PACKED, micro_batches=3)
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
    run = small_run("recipe=lora", "adapter.init=corda", ONE_LAYER)
    assert BEGIN not in plan_memory(run, PACKED, "cpu", steps_only=True).phases


def test_plan_of_bf16_weights_and_steps_in_backward_saves_bytes() -> None:
    """bf16 saves 2 bytes per weight and 2 per gradient, stepping in backward the rest of the gradient."""
    plain, bf16, in_backward = (
        plan_memory(small_run("recipe=full", ONE_LAYER, *words), PACKED, "cpu", steps_only=True)
        for words in ((), BF16, BF16 + IN_BACKWARD)
    )
    weights = plain.anatomy["trained_weights"]
    assert plain.kept_bytes - bf16.kept_bytes == pytest.approx(weights, rel=0.01)
    assert bf16.kept_bytes - in_backward.kept_bytes == pytest.approx(weights / 2, rel=0.01)
