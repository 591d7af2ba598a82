"""What the table says of a GPU, which one is present, and what a processor has."""

import os

import pytest
import torch

from app.config.hardware import every_hardware, read_hardware
from app.plan.machine import ASSUMED_CONTEXT, known_as, machine_of

NAMES = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": None,  # slower than the one of the table
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA L40": None,
    "NVIDIA A10": "a10",
    "NVIDIA A10G": None,
    "NVIDIA A100-SXM4-40GB": "a100_40",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
    "Tesla T4": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_is_known_by_what_its_driver_calls_it(name: str) -> None:
    known = known_as(name, every_hardware())
    assert (known and known.name) == NAMES[name]


def test_facts_of_the_table_become_bytes_and_rates() -> None:
    machine = machine_of(
        read_hardware(["hardware=h100", "hardware.memory_gib=2", "hardware.context_gib=0.5"])
    )
    assert (machine.memory_bytes, machine.context_bytes, machine.context_is_measured) == (2**31, 2**29, True)
    assert (machine.flops_per_second, machine.bytes_per_second, machine.device) == (989e12, 3.35e12, "gpu")
    unmeasured = machine_of(read_hardware(["hardware=h100"]))
    assert (unmeasured.context_bytes, unmeasured.context_is_measured) == (ASSUMED_CONTEXT, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it is the machine at hand")
def test_without_a_gpu_it_is_the_processor_and_its_memory() -> None:
    machine = machine_of(None)
    assert (machine.device, machine.flops_per_second) == ("cpu", None)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 << 28 < machine.memory_bytes <= whole
    assert 50 << 20 < machine.context_bytes < whole  # this process, which has loaded torch


def test_a_gpu_that_is_present_has_the_memory_that_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("app.plan.machine.taken_by_others", lambda: None)
    known = machine_of(None)
    assert (known.name, known.memory_bytes, known.flops_per_second) == ("h100", 80 << 30, 989e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    other = machine_of(None)
    assert (other.name, other.device, other.memory_bytes) == ("Tesla T4", "gpu", 80 << 30)
    assert (other.flops_per_second, other.context_is_measured) == (None, False)
