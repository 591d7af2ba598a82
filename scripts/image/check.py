"""Check an image without a GPU: bitsandbytes must have a library for its CUDA version, and it must load.

python scripts/image/check.py

Otherwise an image with a CUDA version unknown to bitsandbytes would train LoRA and fail at the first QLoRA run.
"""

import ctypes
import sys
from pathlib import Path


def library(cuda: str) -> Path:
    """Return the path of the bitsandbytes library for a CUDA version of torch, e.g. `13.3`; it may not exist."""
    from bitsandbytes.cextension import get_cuda_bnb_library_path
    from bitsandbytes.cuda_specs import CUDASpecs

    major, minor = (int(part) for part in cuda.split(".")[:2])
    path: Path = get_cuda_bnb_library_path(CUDASpecs((9, 0), f"{major}{minor}", (major, minor)))
    return path


def problems(cuda: str) -> list[str]:
    """Return the problems of bitsandbytes with a CUDA version."""
    path = library(cuda)
    if not path.exists():
        return [f"bitsandbytes has no library for CUDA {cuda}: recipe=qlora and 8-bit optimizers would fail"]
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return [f"{path.name}, the bitsandbytes library for CUDA {cuda}, does not load: {error}"]
    return []


def main() -> int:
    """Check the torch of this interpreter."""
    import torch  # first: it loads the CUDA libraries that others find by name

    cuda = torch.version.cuda
    messages = problems(cuda) if cuda else ["this torch was built without CUDA"]
    for problem in messages:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
