"""Why a test may be skipped: all marks and reasons in one place.

Conditions are texts that pytest evaluates when a test's turn comes, so that collecting needs no torch.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TWO_GPUS = "needs two GPUs"
FLASH_ATTENTION = "needs flash-attn, which not every GPU host has"

# On a host with a GPU any other skip in the gpu tier is a failure.
ALLOWED_WITH_GPU = frozenset({TWO_GPUS, FLASH_ATTENTION})

requires_gpu = pytest.mark.skipif("num_gpus() < 1", reason="needs a GPU")
requires_two_gpus = pytest.mark.skipif("num_gpus() < 2", reason=TWO_GPUS)
requires_flash_attention = pytest.mark.skipif("not has_module('flash_attn')", reason=FLASH_ATTENTION)
requires_flash_4 = pytest.mark.skipif(
    "not (has_module('flash_attn') and has_module('flash_attn.cute'))", reason=FLASH_ATTENTION
)
requires_lm_eval = pytest.mark.skipif(
    "not has_module('lm_eval')", reason="needs lm_eval, an extra: pip install -e '.[lm-eval]'"
)
requires_nbclient = pytest.mark.skipif(
    "not (has_module('nbclient') and has_module('ipykernel'))",
    reason="needs nbclient and ipykernel, an extra: pip install -e '.[notebook]'",
)
requires_triton = pytest.mark.skipif("not has_module('triton')", reason="needs Triton, which is there for x86-64 only")
requires_interpreter = pytest.mark.skipif(
    "not interprets_kernels()", reason="needs Triton and no GPU: kernels would not be interpreted"
)
requires_trl = pytest.mark.skipif("not has_module('trl')", reason="needs TRL, an extra: pip install -e '.[bench]'")
requires_chromium = pytest.mark.skipif(
    "not program('chromium')", reason="needs Chromium to look at pages: apt-get install chromium"
)
requires_package_index = pytest.mark.skipif(
    "not package_index()", reason="needs the package index that pip is set up for: nothing answers there"
)
requires_pinned_environment = pytest.mark.skipif(
    "not in_venv()", reason="needs .venv, as scripts/test makes it: another interpreter may have other versions"
)


def num_gpus() -> int:
    """The GPUs that this installation of torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def in_venv() -> bool:
    """Whether this is the interpreter that scripts/setup made."""
    return Path(sys.prefix) == Path(__file__).parents[2] / ".venv"


def interprets_kernels() -> bool:
    """Whether Triton's kernels run on the CPU here, as the first import of Triton decides for the process."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


@cache
def package_index() -> bool:
    """Whether pip finds a package that no folder of wheels on this machine is likely to have."""
    asked = ("-m", "pip", "index", "versions", "bitsandbytes", "--retries", "0", "--timeout", "10")
    return subprocess.run([sys.executable, *asked], capture_output=True, check=False).returncode == 0


def names_of_conditions() -> dict[str, Any]:
    """What the conditions above and below may call."""
    return {
        "num_gpus": num_gpus,
        "has_module": importlib.util.find_spec,
        "program": shutil.which,
        "package_index": package_index,
        "interprets_kernels": interprets_kernels,
        "in_venv": in_venv,
    }
