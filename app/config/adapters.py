"""Kinds of adapter, as facts and rules that messages, pages and memory suggestions share."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from app.config.schema import AdapterConfig

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
    if adapter.experts and adapter.dropout:
        yield (
            f"adapter.dropout={adapter.dropout:g} with adapter.experts=true: PEFT has no dropout for experts. "
            "Set adapter.dropout=0, or adapter.experts=false."
        )
    if not adapter.targets:
        yield "adapter.targets is empty. Set adapter.targets=[all-linear] or names of layers."


ADAPTER_KINDS = {
    "none": AdapterKind("full fine-tuning", lambda _adapter: iter(()), has_rank=False),
    "lora": AdapterKind("LoRA", _low_rank, has_rank=True),
}
