"""What the other stages import on this host: versions, device, free memory. Ends with 1 where anything is missing."""

import argparse
import json
import sys
from importlib import import_module
from typing import Any

_NEEDED = (
    *("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes", "hydra", "omegaconf"),
    *("jinja2", "pyarrow", "rich", "safetensors", "pytest"),
)
_NEEDED_ON_GPU = ("triton",)


def main() -> None:
    """Import each package and ask the device; all problems at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    device = parser.parse_args().device
    problems, found = list[str](), dict[str, Any]()
    for name in (*_NEEDED, *(_NEEDED_ON_GPU if device == "cuda" else ())):
        try:
            found[name] = str(getattr(import_module(name), "__version__", "?"))
        except Exception as error:  # noqa: BLE001  a package may fail in any way as it is imported
            problems.append(f"{name}: {type(error).__name__}: {error}")
    if device == "cuda" and "torch" in found:
        import torch

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found |= {"device": torch.cuda.get_device_name(), "free_gb": free / 1e9, "total_gb": total / 1e9}
        else:
            problems.append("torch sees no GPU")
    print(json.dumps(found))
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
