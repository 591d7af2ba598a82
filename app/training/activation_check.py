"""`finetune check quantization rows=N`: outliers of layer inputs, and the error of int8 products with and without them.

The base model runs on samples of the dataset, one at a time. LLM.int8() multiplies input columns with an outlier
without rounding. Errors are relative to the product of unrounded inputs and weights, by norms, as those of weights are.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.base.base_model import load_base, open_base
from app.base.base_weights import LoadOptions
from app.config.schema import RunConfig
from app.config.tasks import task_of
from app.distributed.process_group import default_device
from app.errors import ConfigError
from app.layers.frozen_linear import OUTLIER_THRESHOLD, LlmInt8Linear, llm_int8_reference
from app.layers.quantization import backbone_linear_layers, weight_of
from app.model.build import DTYPES
from app.training.auto_settings import choose_precision
from app.training.rows import Rows, read_rows


def check_activations(run: RunConfig, count: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the base model on the first `count` training samples and return `activations` of check.json."""
    rows = read_rows(run, open_base(run.model, run.task), say)
    count = min(count, len(rows.data.train))
    if count == 0:
        raise ConfigError("rows: the dataset has no training samples. Set dataset.path to a file with rows.")
    device, dtypes = default_device(), DTYPES[choose_precision(run.precision)]
    options = LoadOptions(dtypes.compute or dtypes.base, device, "eager")
    lm = load_base(rows.run.model, task_of(rows.run.task), options, run.seed)
    say(f"rows    running the model on {count:,} samples")
    sequences = [ids for i in range(count) for ids in _documents(rows, i)]
    facts = activation_outliers(lm, (torch.tensor(ids, device=device).long()[None] for ids in sequences))
    return {"rows": count, "tokens": sum(map(len, sequences)), **facts}


def _documents(rows: Rows, i: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the token IDs of a sample, or of both answers of a pair."""
    ids, second = rows.data.train.ids(i), rows.data.train.second_start(i)
    if rows.objective.documents_per_row > 1 and second > 0:
        yield from (ids[:second], ids[second:])
    else:
        yield ids


@torch.no_grad()
def activation_outliers(lm: Any, sequences: Iterable[Tensor]) -> dict[str, Any]:
    """Return outliers and errors of the linear layers of the backbone, over all layers and for each, for token IDs
    [1, n] of several documents.
    """
    layers = {name: _Inputs(lm.get_submodule(name)) for name in backbone_linear_layers(lm)}
    hooks = [lm.get_submodule(name).register_forward_hook(inputs.count) for name, inputs in layers.items()]
    try:
        for ids in sequences:
            lm(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    called = {name: inputs for name, inputs in layers.items() if inputs.values}
    values = sum(inputs.values for inputs in called.values())
    total = sum(inputs.squares for inputs in called.values())
    return {
        "threshold": OUTLIER_THRESHOLD,
        "outlier_share": sum(inputs.outliers for inputs in called.values()) / values,
        **{
            name: (sum(inputs.lost[name] for inputs in called.values()) / (total or 1.0)) ** 0.5 for name in _THRESHOLDS
        },
        "layers": [{"layer": name, **inputs.facts()} for name, inputs in called.items()],
    }


_THRESHOLDS = {"int8_error": float("inf"), "llm_int8_error": OUTLIER_THRESHOLD}


class _Inputs:
    """Sums over the inputs of one linear layer."""

    def __init__(self, layer: Any) -> None:
        quantized = LlmInt8Linear(weight_of(layer), None)
        self._products = {
            name: partial(llm_int8_reference, weight=quantized.weight, scale=quantized.scale, threshold=threshold)
            for name, threshold in _THRESHOLDS.items()
        }
        self._has_outlier = torch.zeros(quantized.in_features, dtype=torch.bool, device=quantized.weight.device)
        self.values = self.outliers = 0
        self.squares = 0.0  # of the exact output
        self.lost = dict.fromkeys(_THRESHOLDS, 0.0)  # squares of the difference from it

    def count(self, layer: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        """Add the inputs of a call, as a forward hook."""
        x = inputs[0].flatten(0, -2).float()
        outliers = x.abs() >= OUTLIER_THRESHOLD
        self.values += x.numel()
        self.outliers += int(outliers.sum())
        self._has_outlier |= outliers.any(0)
        exact = x @ weight_of(layer).float().T
        self.squares += float(exact.norm()) ** 2
        for name, product in self._products.items():
            self.lost[name] += float((product(x) - exact).norm()) ** 2

    def facts(self) -> dict[str, Any]:
        norm = self.squares or 1.0
        return {
            "outlier_share": self.outliers / self.values,
            "columns": len(self._has_outlier),
            "outlier_columns": int(self._has_outlier.sum()),
            **{name: (lost / norm) ** 0.5 for name, lost in self.lost.items()},
        }
