"""Where a model counts its positions from, and how many it has."""

from typing import Any

from torch import nn


def first_position(lm: Any) -> int:
    """RoBERTa and its kin leave the places up to that of their padding token unused."""
    tables = (
        module for name, module in lm.base_model.named_modules() if name.endswith("position_embeddings")
    )
    places = [table.padding_idx for table in tables if isinstance(table, nn.Embedding)]
    return 0 if not places or places[0] is None else int(places[0]) + 1
