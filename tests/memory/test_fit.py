"""Needed memory against that of a machine, bounds on time, and the table of GPUs."""

import os
from dataclasses import replace

import pytest
import torch

from app.config.load import compose_run
from app.memory.estimate import ASSUMED_CONTEXT_BYTES, check_fit, hardware_named, machine_of, time_bound
from app.memory.fake_tensors import workspace_bytes
from app.memory.trace import worst_case
from tests.memory.facts import GPU, MIB, gpu, plan

CPU = replace(GPU, device="cpu")  # without a caching allocator


def test_verdict_fits_up_to_the_last_byte() -> None:
    """Needed memory is peak, fragmentation (2.5 %), context (50 MiB) and margin (3 % of 1,000 MiB)."""
    given = plan(frozen_weights=(1000 - 50 - 30) / 1.025)
    full = check_fit(given, GPU)
    assert (full.needed_bytes, full.reserved_bytes, full.fits) == (1000 * MIB, 920 * MIB, True)
    assert not check_fit(replace(given, peak_bytes=given.peak_bytes + 1), GPU).fits


def test_verdict_is_hopeless_if_kept_bytes_do_not_fit() -> None:
    available = 1000 - 50 - 30
    for persistent, is_hopeless in ((available, False), (available + 1, True)):
        verdict = check_fit(plan(frozen_weights=2000, kept_bytes=persistent * MIB), CPU)
        assert (verdict.fits, verdict.is_hopeless) == (False, is_hopeless)


@pytest.mark.parametrize(("expandable", "share"), [(True, 0.025), (False, 0.12)])
def test_fragmentation_on_gpu_is_share_of_peak(expandable: bool, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.memory.estimate.has_expandable_segments", lambda: expandable)
    given = plan(frozen_weights=100)
    assert check_fit(given, GPU).lost_bytes == round(share * 100 * MIB)
    assert check_fit(given, replace(GPU, device="cpu")).lost_bytes == 0


def test_time_bound_is_flops_at_peak_rate() -> None:
    shape = worst_case(compose_run(["batching.tokens=512", "batching.accumulation=4"]))
    assert time_bound(plan(flops=2e12), shape, GPU, "bf16") == {"step_seconds": 2.0, "tokens_per_second": 1024.0}
    with_fp8 = replace(GPU, fp8_flops_per_second=2e12)
    bound = time_bound(plan(flops=2e12, fp8_flops=1.5e12), shape, with_fp8, "bf16")
    assert bound is not None
    assert bound["step_seconds"] == pytest.approx(1.25)
    assert time_bound(plan(), shape, replace(GPU, flops_per_second=None), "bf16") is None
    assert time_bound(plan(), shape, GPU, "fp32") is None  # the table has no fp32 rate


def test_worst_case_is_largest_micro_batch_of_settings() -> None:
    packed = worst_case(compose_run(["batching.tokens=600", "dataset.max_length=256"]))
    assert (packed.rows, packed.width, packed.documents) == (1, 600, (256, 256, 88))
    assert (packed.label_rows, packed.longest, packed.tokens) == (600, 256, 600)
    padded = worst_case(
        compose_run(["batching.packing=false", "batching.rows=3", "dataset.max_length=250", "batching.accumulation=5"])
    )
    assert (padded.rows, padded.width, padded.documents) == (3, 256, ())
    assert (padded.label_rows, padded.micro_batches) == (750, 5)
    words = ["model=bert", "dataset=text", "dataset.path=x", "batching.tokens=1024", "task.mask_share=0.25"]
    encoder = worst_case(compose_run(words))
    assert (encoder.documents, encoder.label_rows) == ((512, 512), 258)
    padded_encoder = worst_case(
        compose_run([*words, "batching.packing=false", "batching.rows=2", "dataset.max_length=60"])
    )
    assert (padded_encoder.width, padded_encoder.documents) == (64, (60, 4, 60, 4))


@pytest.mark.parametrize(
    ("words", "documents", "places", "labels"),
    [
        (("model=bert", "batching.packing=false", "batching.rows=2", "dataset.max_length=60"), (60, 4, 60, 4), 4, 2),
        (("model=bert", "batching.packing=false", "batching.rows=16"), (512,) * 16, 32, 16),
        (("model=bert", "batching.tokens=1000"), (512, 488), 2, 2),
        (("model=tiny", "batching.packing=false", "batching.rows=2"), (), 0, 2),
    ],
)
@pytest.mark.parametrize("is_pair", [True, False])
def test_worst_case_of_classifier_is_that_of_the_collator(
    words: tuple[str, ...], documents: tuple[int, ...], places: int, labels: int, is_pair: bool
) -> None:
    rows = f"dataset={'text_pair' if is_pair else 'labelled_text'}"
    found = worst_case(compose_run(["task=classification", rows, "dataset.path=x", *words]))
    assert (found.documents, found.places, found.label_rows, found.pairs) == (documents, places, labels, is_pair)


NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": None,  # slower than the SXM card of the table
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": None,
    "NVIDIA A10": "a10",
    "NVIDIA A100-SXM4-40GB": "a100_40",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "AMD Instinct MI300X": "mi300x",
    "Tesla T4": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_hardware_named_matches_driver_name(name: str) -> None:
    known = hardware_named(name)
    assert (known and known.name) == NAMES[name]


def test_machine_of_hardware_has_bytes_and_rates() -> None:
    machine = machine_of(gpu("h100", memory_gib=2, context_gib=0.5))
    assert (machine.memory_bytes, machine.context_bytes, machine.context_is_measured) == (2**31, 2**29, True)
    assert (machine.flops_per_second, machine.bytes_per_second, machine.device) == (989e12, 3.35e12, "gpu")
    unmeasured = machine_of(gpu("b200"))
    assert (unmeasured.context_bytes, unmeasured.context_is_measured) == (ASSUMED_CONTEXT_BYTES, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_machine_without_gpu_is_processor_and_its_memory() -> None:
    machine = machine_of(None)
    assert (machine.device, machine.flops_per_second) == ("cpu", None)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 << 28 < machine.memory_bytes <= whole
    assert 50 << 20 < machine.context_bytes < whole  # resident memory of this process, with torch loaded


def test_machine_of_present_gpu_has_reported_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory, major, minor = 80 << 30, 7, 5

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("app.memory.estimate.taken_by_others", lambda: None)
    known = machine_of(None)
    assert (known.name, known.memory_bytes, known.flops_per_second) == ("h100", 80 << 30, 989e12)
    assert known.workspace_bytes == 64 * MIB
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    other = machine_of(None)
    assert (other.name, other.device, other.memory_bytes) == ("Tesla T4", "gpu", 80 << 30)
    assert (other.flops_per_second, other.context_is_measured) == (None, False)
    assert other.workspace_bytes == 2 * 8_519_680


@pytest.mark.parametrize(
    ("capability", "size"),
    [("8.9", 17_039_360), ("9.0", 64 * MIB), ("10.0", 64 * MIB), ("12.0", 17_039_360), (None, 17_039_360)],
)
def test_workspace_bytes_follow_compute_capability(capability: str | None, size: int) -> None:
    assert workspace_bytes(capability) == size
