"""Kinds of adapter, as facts and rules that messages, pages and memory suggestions share; where one starts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from app.config.schema import AdapterConfig, RunConfig
from app.files import read_json

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class AdapterKind(NamedTuple):
    """One kind; how it changes a model is `model.adapters`."""

    name: str  # in papers
    problems: Callable[[AdapterConfig], Iterator[str]]  # of its keys
    has_rank: bool  # whether it is matrices of rank adapter.r, which vLLM serves


def _low_rank(adapter: AdapterConfig) -> Iterator[str]:
    if adapter.r < 1:
        yield f"adapter.r={adapter.r} must be at least 1 for adapter.kind={adapter.kind}."
    if adapter.alpha <= 0:
        yield f"adapter.alpha={adapter.alpha:g} must be above 0 for adapter.kind={adapter.kind}."
    if not adapter.targets:
        yield "adapter.targets is empty. Set adapter.targets=[all-linear] or names of layers."


ADAPTER_KINDS = {
    "none": AdapterKind("full fine-tuning", lambda _adapter: iter(()), has_rank=False),
    "lora": AdapterKind("LoRA", _low_rank, has_rank=True),
}


def start_folder(adapter: AdapterConfig) -> Path | None:
    """The folder of `adapter.start`: a run has its adapter in final/."""
    if adapter.start is None:
        return None
    given = Path(adapter.start).expanduser()
    return given / "final" if (given / "final").is_dir() else given


def check_start(run: RunConfig) -> Iterator[str]:
    """Problems with `adapter.start`; a run that is continued needs the folder no more."""
    adapter, folder = run.adapter, start_folder(run.adapter)
    if folder is None or (run.resume is not None and not folder.is_dir()):
        return
    given = f"adapter.start={adapter.start}"
    try:
        found = read_json(folder / ADAPTER)
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not (folder / ADAPTER_WEIGHTS).is_file():
        yield f"{given}: there is no {ADAPTER} with {ADAPTER_WEIGHTS}. Give a run that trained an adapter."
        return
    wanted = {"r": found.get("r"), "alpha": found.get("lora_alpha")}
    if (adapter.r, adapter.alpha) != (wanted["r"], wanted["alpha"]):
        words = " ".join(f"adapter.{key}={value}" for key, value in wanted.items())
        yield f"{given}: it goes on with its own rank and scale. Type {words}."
