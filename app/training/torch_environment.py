"""Environment variables that torch reads as it is loaded, set unless the user has set them."""

import os
from pathlib import Path

from app.config.schema import RunConfig

# torch 2.10 to 2.13 read the first of these that is set; the later two are its older names
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_expandable_segments() -> None:
    """Segments that grow, in place of many of fixed size: freed memory fits later allocations more often."""
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = _EXPANDABLE


def has_expandable_segments() -> bool:
    """Whether a run that is started from this environment has them."""
    value = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if name in os.environ), _EXPANDABLE)
    return _EXPANDABLE.lower() in value.replace(" ", "").lower()


def set_inductor_cache(run: RunConfig) -> None:
    """Compiled graphs lie beside the tokens, where another run of the same model finds them."""
    if run.compile.kind != "none":
        folder = (Path(run.cache_dir) / "inductor").expanduser().resolve()
        os.environ.setdefault(_INDUCTOR_VARIABLE, str(folder))
