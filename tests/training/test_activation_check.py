"""Outliers of layer inputs and errors of int8 products, on a model with columns that are scaled up."""

import pytest
import torch
from torch import Tensor

from app.training.activation_check import activation_outliers
from tests.model.small import built, documents_of

SCALED = [5, 21]
LAYER = "model.layers.0.self_attn.q_proj"


def test_activation_outliers_of_scaled_columns_are_counted_exactly() -> None:
    lm = built("llama", "eager")
    sequences = [ids[None] for ids in documents_of((12, 9, 20))]
    before = {layer["layer"]: layer for layer in activation_outliers(lm, sequences)["layers"]}
    assert before[LAYER]["outlier_columns"] == 0
    assert before[LAYER]["int8_error"] == before[LAYER]["llm_int8_error"]

    inputs: list[Tensor] = []
    with torch.no_grad():
        lm.model.layers[0].input_layernorm.weight[SCALED] = 60.0
    hook = lm.get_submodule(LAYER).register_forward_pre_hook(lambda _layer, args: inputs.append(args[0].flatten(0, -2)))
    facts = activation_outliers(lm, sequences)
    hook.remove()
    outliers = torch.cat(inputs).abs() >= 6
    after = {layer["layer"]: layer for layer in facts["layers"]}
    assert outliers.any(0).nonzero()[:, 0].tolist() == SCALED
    assert (after[LAYER]["outlier_columns"], after[LAYER]["columns"]) == (2, lm.config.hidden_size)
    assert after[LAYER]["outlier_share"] == pytest.approx(float(outliers.float().mean()))
    assert after[LAYER]["int8_error"] > 2 * after[LAYER]["llm_int8_error"]
    assert facts["int8_error"] > facts["llm_int8_error"]
    assert len(after) == 14


def test_activation_outliers_remove_their_hooks() -> None:
    lm = built("gpt2", "eager")
    assert len(activation_outliers(lm, [documents_of((12,))[0][None]])["layers"]) == 8
    assert not any(module._forward_hooks for module in lm.modules())
