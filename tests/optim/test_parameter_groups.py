import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from app.optim.optimizers import Trained, parameter_groups, trained_parameters
from tests.optim.small import regression

DEPRECATED_IN_PEFT = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def names(members: list[Trained], **wanted: bool) -> set[str]:
    return {each.name for each in members if all(getattr(each, key) is wanted[key] for key in wanted)}


def test_llama_has_seven_hidden_matrices_and_all_but_embedding_decay() -> None:
    members = trained_parameters(llama())
    hidden = names(members, is_hidden_matrix=True)
    assert len(hidden) == 7
    assert all(name.startswith("model.layers.0.") and name.endswith("proj.weight") for name in hidden)
    assert names(members, decays=True) == hidden | {"lm_head.weight"}


def test_tied_head_does_not_decay() -> None:
    members = trained_parameters(llama(tied=True))
    assert "model.embed_tokens.weight" in names(members, decays=False, is_hidden_matrix=False)
    assert not any(each.name == "lm_head.weight" for each in members)


@DEPRECATED_IN_PEFT
def test_lora_factors_are_trained_and_decay() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    members = trained_parameters(model)
    assert len(members) == 14
    assert all("lora_" in each.name and each.decays and each.is_hidden_matrix for each in members)


@DEPRECATED_IN_PEFT
def test_head_trained_by_peft_is_no_hidden_matrix() -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    members = trained_parameters(get_peft_model(llama(), adapter))
    besides = [each for each in members if "lora_" not in each.name]
    assert len(besides) == 2
    assert not any(each.is_hidden_matrix for each in besides)


def test_biases_of_experts_do_not_decay() -> None:
    model = nn.Module()
    model.gate_up = nn.Parameter(torch.zeros(2, 3, 4))
    model.gate_up_bias = nn.Parameter(torch.zeros(2, 4))
    members = trained_parameters(model)
    assert [(each.name, each.decays) for each in members] == [("gate_up", True), ("gate_up_bias", False)]


def test_parameter_groups_cover_everything_once_in_order() -> None:
    members = trained_parameters(regression())
    assert [each.name for each in members] == [name for name, _ in regression().named_parameters()]
    decaying, others = parameter_groups(members, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert len(decaying["params"]) + len(others["params"]) == len(members)
    assert parameter_groups([each for each in members if each.decays], 0.1) == [decaying]
