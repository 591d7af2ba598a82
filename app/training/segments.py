"""How torch's allocator on a GPU is told to take memory, unless the user has told it: read before torch is loaded."""

import os

# torch 2.10 to 2.13 read the first of these that is set; the later two are its older names
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def let_segments_grow() -> None:
    """One stretch of memory that grows, in place of many of fixed size: what was freed fits more often."""
    if not any(name in os.environ for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = _EXPANDABLE


def segments_grow() -> bool:
    """Whether they will, in a run that is started from this environment."""
    told = next((os.environ[name] for name in _VARIABLES if name in os.environ), _EXPANDABLE)
    return _EXPANDABLE.lower() in told.replace(" ", "").lower()
