"""The table of backends, and which of them a run takes."""

from collections.abc import Callable

import torch

from app.config.schema import AttentionConfig
from app.errors import ConfigError
from app.model.attention import cudnn, flash, varlen
from app.model.attention.dense import sdpa
from app.model.attention.ragged import cannot
from app.model.attention.rules import Backend, Needs
from app.model.attention.split import split_on

BACKENDS: dict[str, Backend] = {
    "flash": Backend(run=flash.flash, requires=flash.requires, refuses=flash.refuses, traced=flash.bound),
    "varlen": Backend(
        run=varlen.varlen, requires=varlen.requires, refuses=varlen.refuses, traced=varlen.bound
    ),
    "cudnn": Backend(run=cudnn.cudnn, requires=cudnn.requires, refuses=cudnn.refuses, traced=cudnn.bound),
    "sdpa": Backend(run=sdpa, requires=lambda _device: [], traced=split_on),
}
# `auto` takes the first that can do it all: no layer gets another. Not cudnn: no GPU has measured it here
_PREFERRED = ("flash", "varlen", "sdpa")


def select(config: AttentionConfig, device: torch.device, needs: Callable[[], Needs]) -> str:
    """The backend of this run, by name. `needs` costs a model on meta, so it is called only where it matters."""
    if config.kind == "auto":
        return next(name for name in _PREFERRED if _problem(name, device, needs) is None)
    problem = _problem(config.kind, device, needs)
    if problem is not None:
        raise ConfigError(problem)
    return config.kind


def _problem(name: str, device: torch.device, needs: Callable[[], Needs]) -> str | None:
    backend = BACKENDS[name]
    missing = backend.requires(device)
    if missing:
        return f"attention={name} needs {' and '.join(missing)}. Set attention=sdpa."
    wanted = [] if backend.refuses is None else backend.refuses(needs())
    return cannot(name, wanted) if wanted else None
