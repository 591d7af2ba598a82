"""What can be known of an image before it meets a GPU: that bitsandbytes has a library for its CUDA, and that it loads.

python scripts/image/check.py

Without this, an image for a CUDA that bitsandbytes does not know would train LoRA and fail at the first QLoRA.
"""

import ctypes
import sys
from pathlib import Path


def library(cuda: str) -> Path:
    """The one that bitsandbytes takes for that CUDA of torch (`13.3`), whether it is there or not."""
    from bitsandbytes.cextension import get_cuda_bnb_library_path
    from bitsandbytes.cuda_specs import CUDASpecs

    major, minor = (int(part) for part in cuda.split(".")[:2])
    path: Path = get_cuda_bnb_library_path(CUDASpecs((9, 0), f"{major}{minor}", (major, minor)))
    return path


def problems(cuda: str) -> list[str]:
    """With bitsandbytes, for that CUDA."""
    path = library(cuda)
    if not path.exists():
        return [f"bitsandbytes has no library for CUDA {cuda}: recipe=qlora and 8-bit optimizers would fail"]
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return [f"{path.name}, which bitsandbytes takes for CUDA {cuda}, does not load: {error}"]
    return []


def main() -> int:
    """For the torch of this interpreter."""
    import torch  # first: it brings the CUDA libraries that others find by name

    cuda = torch.version.cuda
    found = problems(cuda) if cuda else ["this torch was built without CUDA"]
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
