"""Recurrent mixers, given packed documents as padded rows; their numbers: test_training_model.py."""

import pytest

from app.adapters.adapters import layers_to_adapt
from app.layers.recurrent import missing_kernels, recurrent_mixers
from tests.model import small

ADAPTED = {
    "falcon_h1": {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "mamba2": {"in_proj"},
    "lfm2": {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"},
}


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_leave_out_layers_that_mamba_reads_past(kind: str) -> None:
    layers = layers_to_adapt(["all-linear"], small.built(kind))
    assert {name.rpartition(".")[2] for name in layers} == ADAPTED[kind]


def test_padded_rows_of_uneven_documents_are_less_than_twice_their_tokens() -> None:
    model, sizes = small.training_model_of("lfm2", small.lora()), []
    (mixer,) = recurrent_mixers(model)
    mixer.in_proj.register_forward_pre_hook(lambda _layer, args: sizes.append(args[0].shape[:2].numel()))
    lengths = (40, 3, 1, 2, 17, 9, 2, 33, 5, 1)
    model(small.packed(small.documents_of(lengths)))
    assert sum(lengths) < sum(sizes) < 2 * sum(lengths)


@pytest.mark.parametrize(
    ("kind", "packages"),
    [("qwen3_next", "causal-conv1d flash-linear-attention"), ("bamba", "causal-conv1d mamba-ssm"), ("llama", "")],
)
def test_missing_kernels_are_those_of_the_kind(kind: str, packages: str) -> None:
    assert missing_kernels(recurrent_mixers(small.built(kind))) == packages.split()
