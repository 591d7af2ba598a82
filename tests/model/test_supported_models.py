from pathlib import Path
from typing import Any

import pytest
import torch

from app.base.base_model import load_base
from app.base.base_weights import LoadOptions
from app.config.schema import ModelConfig, TaskConfig
from app.errors import ConfigError
from app.layers.attention import register
from app.model.build import count_weights
from tests.model.small import CAUSAL, KINDS, full, lora, model_config, sections

_UNDECODED: dict[str, Any] = {"is_decoder": False}

# Each would train without an error and be wrong, or fail late and obscurely; with words of the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v32": ({}, "unsupported layers: indexed_attention"),
    "llama": ({"layer_types": ["chunked_attention", "full_attention"]}, "unsupported layers: chunked_attention"),
    "xlnet": ({}, "tokens attend to later tokens, which they must predict"),
    "deberta-v2": ({}, "not a causal language model"),
    "t5": ({}, "it is an encoder-decoder, whose cross-attention"),
    "bert": (_UNDECODED, "its attention is bidirectional"),
    "roberta": (_UNDECODED, "its attention is bidirectional"),
    "cohere2_vision": ({}, "its text part, of kind cohere2, is not computed as in the whole model"),
    "florence2": ({}, "it is an encoder-decoder, whose cross-attention"),
}


MASKED_REFUSED = {
    "llama": "it is not an encoder with a head for hidden tokens",
    "bart": "it is an encoder-decoder, whose cross-attention has no packing, memory estimate or generation here",
    "funnel": "it computes different logits for padded documents",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kind_that_would_be_trained_wrongly_is_refused_by_name(kind: str) -> None:
    given, reason = REFUSED[kind]
    architecture = {"model_type": kind, "num_hidden_layers": 2, **given}
    config = model_config(architecture=architecture)
    with pytest.raises(ConfigError, match=rf"^model.architecture: .* kind {kind} is not supported .*({reason})"):
        count_weights(sections(config, full(), task=TaskConfig(kind="causal")))


@pytest.mark.parametrize(("kind", "reason"), MASKED_REFUSED.items())
def test_so_is_one_that_cannot_find_hidden_tokens(kind: str, reason: str) -> None:
    config = model_config(architecture={"model_type": kind})
    with pytest.raises(ConfigError, match=rf" kind {kind} is not supported \({reason}\)\. Choose another: bert"):
        count_weights(sections(config, full(), task=TaskConfig(kind="masked")))


def test_the_task_that_a_kind_is_made_for_is_named() -> None:
    for kind, given, fitting in (("llama", "masked", "causal"), ("modernbert", "causal", "masked")):
        config = model_config(architecture={"model_type": kind, "num_hidden_layers": 2})
        with pytest.raises(ConfigError, match=f"or try task={fitting}, which has a class for this kind"):
            count_weights(sections(config, full(), task=TaskConfig(kind=given)))
    config = model_config(architecture={"model_type": "t5", "num_hidden_layers": 2})
    with pytest.raises(ConfigError, match=r"convolutions\.$"):  # its class for other tasks is refused too
        count_weights(sections(config, full(), task=TaskConfig(kind="causal")))


def test_loading_refuses_too_and_before_it_reads_weights(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("xlnet", n_layer=1, d_model=8, n_head=2, vocab_size=8).save_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    config = model_config(path=str(tmp_path))
    message = rf"^model.path={tmp_path}: .* kind xlnet is not supported"
    with pytest.raises(ConfigError, match=message):
        count_weights(sections(config, full()))
    with pytest.raises(ConfigError, match=message):
        load(config)


def load(config: ModelConfig) -> Any:
    return load_base(config, CAUSAL, LoadOptions(torch.float32, torch.device("cpu"), register("sdpa")), seed=0)


@pytest.mark.parametrize("kind", [*KINDS, "opt"])
def test_the_plan_accepts_kinds_that_are_right_and_counts_them(kind: str) -> None:
    config = model_config(kind)
    lm = load(config)
    plan = count_weights(sections(config, full()))
    assert plan.total == plan.trained == sum(p.numel() for p in lm.parameters())
    with_adapter = count_weights(sections(config, lora(r=2)))
    assert 0 < with_adapter.trained < plan.total
    assert with_adapter.base == plan.total
    assert with_adapter.total == plan.total + with_adapter.trained
    assert with_adapter.trained_share == with_adapter.trained / with_adapter.total


def test_model_counts_text_separates_base_and_adapter() -> None:
    config = model_config()
    assert str(count_weights(sections(config, lora()))) == "19,616 parameters + adapter 3,712 (15.9%)"
    assert str(count_weights(sections(config, full()))) == "19,616 parameters, all trainable"
    partly = count_weights(sections(config, full(), freeze=("embed_tokens",)))
    assert str(partly) == "19,616 parameters, 17,568 trainable (89.6%)"


def test_a_model_whose_head_needs_its_backbone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def asks(self: Any, *args: Any, **others: Any) -> Any:
        self.model.embed_tokens.weight.shape  # noqa: B018
        return forward(self, *args, **others)

    monkeypatch.setattr(LlamaForCausalLM, "forward", asks)
    with pytest.raises(ConfigError, match=r"kind llama .*\(its head cannot run without its backbone"):
        count_weights(sections(model_config("llama"), full()))
