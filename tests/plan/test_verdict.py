"""What is needed is the sum of its parts, and it fits up to the last byte."""

from dataclasses import replace

import pytest

from app.config.load import compose_run
from app.plan.allocator import footprint
from app.plan.lost import lost_bytes
from app.plan.speed import bound
from app.plan.verdict import bucket_bytes, judge
from app.plan.worst_case import worst_case
from tests.plan.facts import GPU, MIB, plan


def test_it_fits_up_to_the_last_byte() -> None:
    """Peak, allocator, context (50 MiB) and margin (3 % of 1,000 MiB)."""
    room = 1000 - 50 - 30
    given = plan(frozen_weights=room - 20)
    full = judge(given, GPU, 20 * MIB)
    assert (full.needed_bytes, full.reserved_bytes, full.fits) == (1000 * MIB, room * MIB, True)
    assert not judge(given, GPU, 20 * MIB + 1).fits
    assert not judge(replace(given, peak_bytes=given.peak_bytes + 1), GPU, 20 * MIB).fits


def test_hopeless_is_what_no_smaller_micro_batch_brings_in() -> None:
    room = 1000 - 50 - 30
    for kept, is_hopeless in ((room, False), (room + 1, True)):
        verdict = judge(plan(frozen_weights=2000, kept_bytes=kept * MIB), GPU, 0)
        assert (verdict.fits, verdict.is_hopeless) == (False, is_hopeless)


def test_data_parallelism_keeps_the_gradients_that_are_not_there_at_the_peak() -> None:
    early, late = plan(trained_weights=100), plan(trained_weights=100, gradients=100)
    assert [bucket_bytes(each, 1) for each in (early, late)] == [0, 0]
    assert [bucket_bytes(each, 2) for each in (early, late)] == [100 * MIB, 0]
    assert judge(early, GPU, 0, processes=2).needed_bytes - judge(early, GPU, 0).needed_bytes == 100 * MIB
    assert bucket_bytes(replace(early, divided=True), 2) == 0, "sums are part of such a plan"


@pytest.mark.parametrize("grow", [True, False])
def test_layers_that_were_not_traced_lose_a_share_more(grow: bool) -> None:
    events = ((1, 30 * MIB), (2, 30 * MIB), (1, -30 * MIB), (3, 40 * MIB))
    few = footprint(events, grow=grow)
    assert few.lost_bytes == 30 * MIB
    traced = plan(frozen_weights=70, events=events)
    assert lost_bytes(traced, grow=grow) == few.lost_bytes
    deeper = plan(frozen_weights=1070, events=None, few_events=events)
    assert lost_bytes(deeper, grow=grow) - few.lost_bytes == (40 if grow else 120) * MIB
    assert lost_bytes(replace(deeper, peak_bytes=0), grow=grow) == few.lost_bytes


def test_a_bound_is_all_arithmetic_at_full_rate() -> None:
    shape = worst_case(compose_run(["batching.tokens=512", "batching.accumulation=4"]))
    found = bound(plan(flops=2e12), shape, GPU, "bf16")
    assert found is not None
    assert (found.step_seconds, found.tokens_per_second) == (2.0, 1024.0)
    fast = replace(GPU, fp8_flops_per_second=2e12)
    eight = bound(plan(flops=2e12, fp8_flops=1.5e12), shape, fast, "bf16")
    assert eight is not None
    assert eight.step_seconds == pytest.approx(1.25)
    assert bound(plan(), shape, replace(GPU, flops_per_second=None), "bf16") is None
    assert bound(plan(), shape, GPU, "fp32") is None  # the table has no rate of it


def test_the_worst_micro_batch_is_what_the_settings_allow() -> None:
    packed = worst_case(compose_run(["batching.tokens=600", "dataset.max_length=256"]))
    assert (packed.rows, packed.width, packed.documents) == (1, 600, (256, 256, 88))
    assert (packed.label_rows, packed.longest, packed.tokens) == (600, 256, 600)
    padded = worst_case(
        compose_run(
            ["batching.packing=false", "batching.rows=3", "dataset.max_length=250", "batching.accumulation=5"]
        )
    )
    assert (padded.rows, padded.width, padded.documents) == (3, 256, ())
    assert (padded.label_rows, padded.micro_batches) == (750, 5)
    words = ["model=bert", "dataset=text", "dataset.path=x", "batching.tokens=1024", "task.mask_share=0.25"]
    hidden = worst_case(compose_run(words))
    assert (hidden.documents, hidden.label_rows) == ((512, 512), 258)
    apart = worst_case(
        compose_run([*words, "batching.packing=false", "batching.rows=2", "dataset.max_length=60"])
    )
    assert (apart.width, apart.documents) == (64, (60, 4, 60, 4))
