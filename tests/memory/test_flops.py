"""FLOPs of a step against closed forms."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.layers.operations import COSTS
from app.memory.estimate import plan_memory
from tests.memory.truth import EXPERTS, PACKED, PADDED, small_run

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCABULARY = 128, 192, 4, 2, 3, 1024
SIZE = HIDDEN // HEADS
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * SIZE + 3 * HIDDEN * INNER)
FORWARD, WITH_BACKWARD = 2, 6  # FLOPs per weight and token


def pairs(lengths: tuple[int, ...]) -> int:
    return sum(n * (n + 1) // 2 for n in lengths)


def rotary_flops(tokens: int) -> int:
    """FLOPs of rotary embeddings, which some versions of transformers compute by a matrix product."""
    config = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS)
    with FlopCounterMode(display=False) as counter:
        LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(tokens)[None])
    return int(counter.get_total_flops())


@pytest.mark.parametrize(("layout", "device"), [("packed", "gpu"), ("padded", "cpu")])
def test_flops_of_full_fine_tuning_equal_closed_form(layout: str, device: str) -> None:
    shape = PACKED if layout == "packed" else PADDED
    packing = f"batching.packing={str(layout == 'packed').lower()}"
    plan = plan_memory(small_run("recipe=full", "training.recompute=false", packing), shape, device)
    attention = LAYERS * (4 + 10) * HEADS * SIZE * pairs(shape.documents or (shape.width,) * shape.rows)
    head = WITH_BACKWARD * VOCABULARY * HIDDEN * shape.label_rows
    assert plan.flops == WITH_BACKWARD * LINEAR * shape.tokens + head + attention + rotary_flops(shape.tokens)
    assert plan.flops_per_token == pytest.approx(plan.flops / shape.tokens)


def test_flops_of_lora_omit_gradients_of_frozen_weights() -> None:
    """4 FLOPs per frozen weight and token; 2 for q, k and v of the first layer, whose input needs no gradient."""
    plan = plan_memory(small_run("recipe=lora", "training.recompute=false", "adapter.r=1"), PACKED)
    attention = LAYERS * (4 + 10) * HEADS * SIZE * pairs(PACKED.documents)
    head = 4 * VOCABULARY * HIDDEN * PACKED.label_rows
    base = 4 * LINEAR * PACKED.tokens
    first = FORWARD * (HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * SIZE) * PACKED.tokens
    adapter = 6 * LAYERS * (4 * HIDDEN + 2 * KV_HEADS * SIZE + 2 * HIDDEN + 3 * (HIDDEN + INNER)) * PACKED.tokens
    assert plan.flops == pytest.approx(base - first + head + attention + adapter, rel=0.002)


def test_flops_of_nf4_base_equal_those_of_bf16() -> None:
    plain, nf4 = (plan_memory(small_run(f"recipe={kind}"), PACKED) for kind in ("lora", "qlora"))
    assert plain.flops == nf4.flops
    assert plain.peak_bytes > nf4.peak_bytes


def test_flops_of_fp8_base_are_mostly_fp8() -> None:
    words = ("recipe=lora", "adapter.r=1", "training.recompute=false")
    plain, fp8 = (plan_memory(small_run(*words, kind), PACKED) for kind in ("seed=1", "quantization=fp8"))
    assert plain.flops == fp8.flops
    first = FORWARD * (HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * SIZE) * PACKED.tokens
    assert plain.fp8_flops == 0
    assert fp8.fp8_flops == 4 * LINEAR * PACKED.tokens - first


def test_flops_of_optimizer_are_counted_once_per_step() -> None:
    """Muon multiplies matrices, AdamW does not."""
    one, three = (
        plan_memory(small_run("recipe=full", "optimizer=muon"), replace(PACKED, micro_batches=count))
        for count in (1, 3)
    )
    adamw = plan_memory(small_run("recipe=full"), PACKED)
    update = one.flops - adamw.flops
    assert update > 0
    assert three.flops == 3 * adamw.flops + update
    assert one.flops_per_token == three.flops_per_token == adamw.flops_per_token


def test_flops_of_experts_count_those_of_a_token() -> None:
    """A token uses two of four experts, and the router scores all four."""
    words = ("recipe=full", "training.recompute=false", "precision=bf16")
    dense, sparse = (plan_memory(small_run(*words, *more), PACKED) for more in ((), EXPERTS))
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
