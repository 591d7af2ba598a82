"""Which numbers this machine can compute in, and which of them are fast."""

from pathlib import Path

import torch

from app.config.schema import PrecisionConfig

_AMPERE = (8, 0)
_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is aarch64's name


def check_precision(precision: PrecisionConfig) -> list[str]:
    """What this machine cannot compute in, with the alternatives."""
    has_gpu = torch.cuda.is_available()
    if precision.kind == "tf32" and not (has_gpu and torch.cuda.get_device_capability() >= _AMPERE):
        return [
            "precision=tf32 needs an NVIDIA GPU of the Ampere generation or newer. Choose precision=fp32 or bf16."
        ]
    if precision.kind == "bf16" and has_gpu and not _gpu_has_bf16():
        return ["precision=bf16 is not in the hardware of this GPU. Choose precision=fp16 or fp32."]
    return []


def choose_precision(precision: PrecisionConfig) -> str:
    """What `auto` means here. A CPU without bf16 instructions is ten times slower in bf16 than in fp32."""
    if precision.kind != "auto":
        return precision.kind
    if torch.cuda.is_available():
        return "bf16" if _gpu_has_bf16() else "fp16"
    return "bf16" if _cpu_has_bf16() else "fp32"


def _gpu_has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _cpu_has_bf16() -> bool:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not _CPU_FLAGS.isdisjoint(flags.split())
