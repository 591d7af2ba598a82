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

ONE_GPU = "needs a GPU"
TWO_GPUS = "needs two GPUs"
FLASH_ATTENTION = "needs flash-attn, which not every GPU host has"
ORDINARY_USER = "needs an ordinary user: file permissions do not bind root"
LM_EVAL = "needs lm_eval, an extra: pip install -e '.[lm-eval]'"
TRITON = "needs Triton, which is there for x86-64 only"
INTERPRETER = "needs Triton and no GPU: kernels would not be interpreted"
TRL = "needs TRL, an extra: pip install -e '.[bench]'"
PACKAGE_INDEX = "needs the package index that pip is set up for: nothing answers there"
CHROMIUM = "needs Chromium to look at pages: apt-get install chromium"
OTHER_PYTHON = "needs .venv, as scripts/test makes it: another interpreter may have other versions"

# On a host with a GPU any other skip in the gpu tier is a failure.
ALLOWED_WITH_GPU = frozenset({TWO_GPUS, FLASH_ATTENTION, ORDINARY_USER})

requires_gpu = pytest.mark.skipif("num_gpus() < 1", reason=ONE_GPU)
requires_two_gpus = pytest.mark.skipif("num_gpus() < 2", reason=TWO_GPUS)
requires_flash_attention = pytest.mark.skipif("not has_module('flash_attn')", reason=FLASH_ATTENTION)
requires_ordinary_user = pytest.mark.skipif("user_id() == 0", reason=ORDINARY_USER)
requires_lm_eval = pytest.mark.skipif("not has_module('lm_eval')", reason=LM_EVAL)
requires_triton = pytest.mark.skipif("not has_module('triton')", reason=TRITON)
requires_interpreter = pytest.mark.skipif("not interprets_kernels()", reason=INTERPRETER)
requires_trl = pytest.mark.skipif("not has_module('trl')", reason=TRL)
requires_chromium = pytest.mark.skipif("not program('chromium')", reason=CHROMIUM)
requires_package_index = pytest.mark.skipif("not package_index()", reason=PACKAGE_INDEX)

requires_pinned_environment = pytest.mark.skipif("not in_venv()", reason=OTHER_PYTHON)


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
        "user_id": os.geteuid,
        "program": shutil.which,
        "package_index": package_index,
        "interprets_kernels": interprets_kernels,
        "in_venv": in_venv,
    }
