from typing import Any

import pytest
import torch
from torch import nn

from app.model.drawing import draw
from app.model.weights import build_on_meta
from tests.model.small import CAUSAL, built, model_config

CPU = torch.device("cpu")


def drawn(kind: str, seed: int = 0) -> Any:
    lm = build_on_meta(model_config(kind), CAUSAL, "eager")
    draw(lm, CPU, seed, lambda layer: None)
    return lm


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "gpt_oss", "mixtral", "deepseek_v3", "opt"])
def test_every_kind_is_drawn_whole(kind: str) -> None:
    """As large as its own initialisation makes it, buffers equal, tied weights tied."""
    lm, whole = drawn(kind), fresh(kind)
    expected = dict(whole.named_parameters())
    assert {name for name, _ in lm.named_parameters()} == expected.keys()
    for name, parameter in lm.named_parameters():
        assert parameter.device == CPU
        if parameter.numel() > 500 and float(expected[name].detach().std()) > 0:
            assert float(parameter.detach().std()) == pytest.approx(
                float(expected[name].detach().std()), rel=0.2
            ), name
        elif float(expected[name].detach().float().std(correction=0)) == 0:
            assert parameter.equal(expected[name]), name
    buffers = dict(whole.named_buffers())
    assert all(buffer.equal(buffers[name]) for name, buffer in lm.named_buffers())
    head, embedding = lm.get_output_embeddings().weight, lm.get_input_embeddings().weight
    assert (head is embedding) == lm.config.tie_word_embeddings


def fresh(kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    config = built(kind, "eager").config
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_numbers_follow_the_seed_and_draw_nothing_from_the_program() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = drawn("llama").state_dict()
    assert torch.rand(3).equal(expected)
    again, other = drawn("llama").state_dict(), drawn("llama", seed=1).state_dict()
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["lm_head.weight"].equal(other["lm_head.weight"])


def test_no_more_than_one_layer_is_ever_there_before_it_is_taken() -> None:
    lm = build_on_meta(model_config(), CAUSAL, "eager")
    layers = list(lm.model.layers)
    seen: list[int] = []

    def take(layer: nn.Module) -> None:
        there = [each for each in layers if not next(each.parameters()).is_meta]
        assert there == [layer]
        assert not any(p.is_meta for p in layer.parameters())
        assert lm.lm_head.weight.is_meta
        seen.append(layers.index(layer))
        layer.to_empty(device="meta")

    draw(lm, CPU, 0, take)
    assert seen == [0, 1]
