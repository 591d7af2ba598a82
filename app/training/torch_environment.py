"""Environment variables read by torch when it is loaded, set unless the user has set them."""

import os
from pathlib import Path

from app.config.schema import RunConfig

# torch 2.10 to 2.13 read the first of these that is set; the last two are older names
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_expandable_segments() -> None:
    """Enable expandable segments instead of many of fixed size: freed memory fits later allocations more often."""
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = _EXPANDABLE


def has_expandable_segments() -> bool:
    """Return whether a run started in this environment has expandable segments."""
    value = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ), _EXPANDABLE)
    return _EXPANDABLE.lower() in value.replace(" ", "").lower()


def set_inductor_cache(run: RunConfig) -> None:
    """Store compiled graphs next to the tokens, for other runs of the same model."""
    if run.compile.kind != "none":
        folder = (Path(run.cache_dir) / "inductor").expanduser().resolve()
        os.environ.setdefault(_INDUCTOR_VARIABLE, str(folder))
