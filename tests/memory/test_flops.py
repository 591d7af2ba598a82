"""Arithmetic of a step against the closed form."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from app.memory import flops
from app.memory.estimate import plan_memory
from tests.memory.truth import EXPERTS, PACKED, PADDED, small_run

HIDDEN, INNER, HEADS, SHARED, LAYERS, VOCABULARY = 128, 192, 4, 2, 3, 1024
SIZE = HIDDEN // HEADS
LINEAR = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * SHARED * SIZE + 3 * HIDDEN * INNER)
FORWARD, WITH_BACKWARD = 2, 6  # multiplications and additions of a weight and a token


def pairs(lengths: tuple[int, ...]) -> int:
    return sum(n * (n + 1) // 2 for n in lengths)


def of_angles(tokens: int) -> int:
    """Of rotary positions, where this transformers makes them by a product of matrices."""
    numbers = LlamaConfig(hidden_size=HIDDEN, num_attention_heads=HEADS)
    with FlopCounterMode(display=False) as counter:
        LlamaRotaryEmbedding(numbers)(torch.zeros(1), torch.arange(tokens)[None])
    return int(counter.get_total_flops())


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_full_fine_tuning_is_the_closed_form(layout: str, device: str) -> None:
    shape = PACKED if layout == "packed" else PADDED
    packing = f"batching.packing={str(layout == 'packed').lower()}"
    plan = plan_memory(small_run("recipe=full", "training.recompute=false", packing), shape, device)
    attention = LAYERS * (4 + 10) * HEADS * SIZE * pairs(shape.documents or (shape.width,) * shape.rows)
    head = WITH_BACKWARD * VOCABULARY * HIDDEN * shape.label_rows
    assert plan.flops == WITH_BACKWARD * LINEAR * shape.tokens + head + attention + of_angles(shape.tokens)
    assert plan.flops_per_token == pytest.approx(plan.flops / shape.tokens)


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    """Four for each weight and token; q, k and v of the first layer have no input that needs a gradient."""
    plan = plan_memory(small_run("recipe=lora", "training.recompute=false", "adapter.r=1"), PACKED)
    attention = LAYERS * (4 + 10) * HEADS * SIZE * pairs(PACKED.documents)
    head = 4 * VOCABULARY * HIDDEN * PACKED.label_rows
    base = 4 * LINEAR * PACKED.tokens
    first = FORWARD * (HIDDEN * HIDDEN + 2 * HIDDEN * SHARED * SIZE) * PACKED.tokens
    adapter = (
        6 * LAYERS * (4 * HIDDEN + 2 * SHARED * SIZE + 2 * HIDDEN + 3 * (HIDDEN + INNER)) * PACKED.tokens
    )
    assert plan.flops == pytest.approx(base - first + head + attention + adapter, rel=0.002)


def test_a_packed_base_does_the_same_arithmetic() -> None:
    plain, packed = (plan_memory(small_run(f"recipe={kind}"), PACKED) for kind in ("lora", "qlora"))
    assert plain.flops == packed.flops
    assert plain.peak_bytes > packed.peak_bytes


def test_a_base_in_fp8_does_the_same_arithmetic_and_most_of_it_in_fp8() -> None:
    given = ("recipe=lora", "adapter.r=1", "training.recompute=false")
    plain, eight = (plan_memory(small_run(*given, kind), PACKED) for kind in ("seed=1", "quantization=fp8"))
    assert plain.flops == eight.flops
    first = FORWARD * (HIDDEN * HIDDEN + 2 * HIDDEN * SHARED * SIZE) * PACKED.tokens
    assert plain.fp8_flops == 0
    assert eight.fp8_flops == 4 * LINEAR * PACKED.tokens - first


def test_an_update_is_counted_once_and_is_no_arithmetic_of_tokens() -> None:
    """Muon multiplies matrices; AdamW does not."""
    one, three = (
        plan_memory(small_run("recipe=full", "optimizer=muon"), replace(PACKED, micro_batches=count))
        for count in (1, 3)
    )
    adamw = plan_memory(small_run("recipe=full"), PACKED)
    update = one.flops - adamw.flops
    assert update > 0
    assert three.flops == 3 * adamw.flops + update
    assert one.flops_per_token == three.flops_per_token == adamw.flops_per_token


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_of_experts_those_that_a_token_is_sent_to(precision: str) -> None:
    """Two of four, and a router that knows all four."""
    words = ("recipe=full", "training.recompute=false", f"precision={precision}")
    dense, sparse = (plan_memory(small_run(*words, *more), PACKED) for more in ((), EXPERTS))
    more = LAYERS * (3 * HIDDEN * INNER + 4 * HIDDEN)
    assert sparse.flops - dense.flops == WITH_BACKWARD * more * PACKED.tokens


@pytest.mark.parametrize(
    ("left", "right", "inner"),
    [
        ((12, 8), (4, 8, 16), 8),
        ((4, 16, 8), (8, 12), 8),
        ((16, 12), (12, 8), 3),  # rows of each of four groups
        ((4, 12, 8), (4, 8, 16), 8),
    ],
)
def test_of_rows_in_groups_what_each_number_that_comes_out_takes(
    left: tuple[int, ...], right: tuple[int, ...], inner: int
) -> None:
    a, b = torch.ones(left), torch.ones(right)
    ends = None if a.ndim == b.ndim == 3 else torch.tensor([3, 6, 9, 12], dtype=torch.int32)
    out = torch.nn.functional.grouped_mm(a, b, offs=ends)
    assert out.unique().tolist() == [inner]
    assert flops._grouped_product(left, right) == FORWARD * out.numel() * inner
