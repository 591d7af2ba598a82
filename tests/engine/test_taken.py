"""What others hold of a GPU: through a library with the structures of NVML's header, compiled here."""

import ctypes
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.engine import taken
from app.engine.taken import Taken, asked_of_driver, notes, taken_by_others
from app.plan.fit import machine_of
from tests.marks import requires_compiler

UUID = "01234567-89ab-cdef-0123-456789abcdef"
SOURCE = r"""
#include <string.h>
typedef void *Device;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } Process;
static int begun = 0;
int nvmlInit_v2(void) { begun++; return 0; }
int nvmlShutdown(void) { begun--; return 0; }
int still_begun(void) { return begun; }
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
    if (!begun) return 1;
    if (strcmp(uuid, "KIND-01234567-89ab-cdef-0123-456789abcdef")) return 6;
    *device = (Device)0x1234567890abULL;
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(Device device, Memory *memory) {
    if (device != (Device)0x1234567890abULL || memory->version != (sizeof(Memory) | (2 << 24))) return 2;
    memory->total = 80000000000ULL; memory->reserved = 500000000ULL;
    memory->used = 23000000000ULL; memory->free = 56500000000ULL;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned int *count, Process *found) {
    Process all[] = {{PROCESSES}};
    unsigned int many = sizeof(all) / sizeof(Process), room = *count;
    *count = many;
    if (room < many) return 7;
    memcpy(found, all, sizeof(all));
    return 0;
}
"""


def library(folder: Path, processes: str, kind: str = "GPU") -> str:
    source, built = folder / "nvml.c", folder / "libnvml.so"
    source.write_text(SOURCE.replace("PROCESSES", processes).replace("KIND", kind))
    compiler = shutil.which("cc")
    assert compiler
    subprocess.run([compiler, "-shared", "-fPIC", "-o", built, source], check=True)
    return str(built)


@requires_compiler
@pytest.mark.parametrize("kind", ["GPU", "MIG"])
def test_the_driver_tells_whose_memory_it_is(tmp_path: Path, kind: str) -> None:
    """This process's own part is no other's."""
    own = f"{os.getpid()}, 600000000ULL, ~0u, ~0u"
    built = library(tmp_path, f"1234, 22000000000ULL, ~0u, ~0u}}, {{{own}}}, {{77, ~0ULL, ~0u, ~0u", kind)
    found = asked_of_driver(UUID, built)
    assert found == Taken(80_000_000_000, 22_400_000_000, ((77, None), (1234, 22_000_000_000)))
    assert found.words == ("22.4 GB of 80.0 GB are taken by other processes (pid 77, pid 1234: 22.0 GB)")
    assert ctypes.CDLL(built).still_begun() == 0, "what was begun is ended"


@requires_compiler
def test_a_gpu_that_the_driver_does_not_know(tmp_path: Path) -> None:
    built = library(tmp_path, "1, 1, 1, 1")
    assert asked_of_driver("another", built) is None
    assert asked_of_driver("", built) is None
    assert ctypes.CDLL(built).still_begun() == 0


def test_without_the_library_or_its_functions_nothing_is_known() -> None:
    assert asked_of_driver(UUID, "libno-such-library.so.1") is None
    assert asked_of_driver(UUID, "libc.so.6") is None


def test_what_fits_is_decided_on_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 << 30

    for name, value in (
        ("is_available", True),
        ("get_device_name", "Some GPU"),
        ("get_device_properties", Properties),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    full = Taken(80 << 30, 23 << 30, ((5, 22 << 30),))
    monkeypatch.setattr(taken, "taken_by_others", lambda: full)
    monkeypatch.setattr("app.plan.fit.taken_by_others", lambda: full)
    machine = machine_of(None)
    assert machine.memory_bytes == 57 << 30
    assert machine.label == "Some GPU, of which others hold 24.7 GB"
    assert notes() == [full.words]
    monkeypatch.setattr(taken, "taken_by_others", lambda: replace(full, bytes=100 << 20))
    assert notes() == [], "a screen is nothing to speak of"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_processor_is_not_asked() -> None:
    taken_by_others.cache_clear()
    assert taken_by_others() is None
    assert notes() == []
