"""An adapter method and an attention backend of a test, as one entry in each table of their kind."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from app.adapters.adapter_methods import AdapterMethod
from app.adapters.adapters import quiet_peft
from app.batch import PackedSequences
from app.config.adapters import AdapterKind
from app.errors import ConfigError, EnvironmentProblem
from app.layers import attention
from app.layers.attention.requirements import Needs, Rules
from tests.harness.runs import losses, result
from tests.promise.conftest import Toys

SCALES = AdapterKind("IA3", lambda _adapter: iter(()), has_rank=False)
SCALES_YAML = "kind: ia3\ntargets: [q_proj, v_proj, down_proj]\n"


class Ia3(AdapterMethod):
    """A vector for each layer that scales its outputs, and its inputs where it ends a block; it starts at one."""

    peft_type = "IA3"
    written: ClassVar = {"feedforward_modules": lambda value: isinstance(value, list)}
    trained = (".ia3_l.default",)
    moves_in: ClassVar = {1: ".ia3_l."}

    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        from peft import IA3Config

        return IA3Config(**shared, feedforward_modules=["down_proj"])


def logits_in_peft(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the base, and of the base with final/, both as other programs load them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids, base = torch.arange(5, 45)[None], AutoModelForCausalLM.from_pretrained(run / "base").eval()
    with torch.no_grad(), quiet_peft():
        return base(ids).logits, PeftModel.from_pretrained(base, str(run / "final")).eval()(ids).logits


def test_adapter_method_trains_and_final_is_what_plain_peft_loads(toys: Toys) -> None:
    toys.add("adapter", "ia3", {"ADAPTERS": Ia3, "ADAPTER_KINDS": SCALES})
    toys.choice("adapter", "ia3", SCALES_YAML)
    trainer = toys.last_trainer()
    run = toys.train("run", "recipe=lora", "adapter=ia3", "optimizer.lr=0.3")
    base, tuned = logits_in_peft(run)
    assert (tuned - base).abs().max() > 0.1
    with torch.no_grad():
        ours = trainer().parts.stepper.model.eval().language_model(input_ids=torch.arange(5, 45)[None]).logits
    torch.testing.assert_close(tuned, ours, rtol=0, atol=1e-5)
    assert result(run)["memory_predicted_bytes"] is not None
    assert "IA3 adapter" in (run / "final" / "README.md").read_text()


def test_adapter_method_without_configuration_is_named(toys: Toys) -> None:
    nameless = type("Nameless", (Ia3,), {"peft_config": AdapterMethod.peft_config})
    toys.add("adapter", "ia3", {"ADAPTERS": nameless, "ADAPTER_KINDS": SCALES})
    toys.choice("adapter", "ia3", SCALES_YAML)
    with pytest.raises(TypeError, match=r"abstract method '?peft_config"):
        toys.train("run", "recipe=lora", "adapter=ia3")
    drawn = type("Drawn", (Ia3,), {"on_meta": True})
    toys.add("adapter", "ia3", {"ADAPTERS": drawn, "ADAPTER_KINDS": SCALES})
    with pytest.raises(NotImplementedError, match=r"^draw: the weights of an adapter that is attached on meta"):
        toys.train("again", "recipe=lora", "adapter=ia3")


def masked(q: Tensor, k: Tensor, v: Tensor, rules: Rules, documents: PackedSequences | None) -> Tensor:
    """All documents in one call, by a mask of those that lie side by side."""
    number = torch.zeros(q.shape[2], dtype=torch.int64)
    if documents is not None:
        number = torch.arange(len(documents.lengths)).repeat_interleave(torch.tensor(documents.lengths))
    seen = (number[:, None] == number) & torch.ones(q.shape[2], q.shape[2]).tril().bool()
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = (q @ k.mT * (rules.scale or q.shape[-1] ** -0.5)).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def leaking(q: Tensor, k: Tensor, v: Tensor, rules: Rules, _documents: PackedSequences | None) -> Tensor:
    return masked(q, k, v, rules, None)


def only_packed(needs: Needs) -> list[str]:
    return [] if needs.packed else ["padded rows"]


def test_attention_backend_trains_as_sdpa_and_its_leaking_twin_is_refused(toys: Toys) -> None:
    right = attention.Backend(masked, requires=lambda _device: [], refuses=only_packed)
    toys.add("attention", "masked", {"BACKENDS": right})
    toys.choice("attention", "masked", "kind: masked\n")
    recipe = ("recipe=full", "optimizer.lr=1e-2")
    runs = [toys.train(name, *recipe, f"attention={name}") for name in ("masked", "sdpa")]
    found, expected = map(losses, runs)
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]

    with pytest.raises(ConfigError, match=r"^attention=masked does not support padded rows"):
        toys.train("padded", *recipe, "attention=masked", "batching.packing=false")
    toys.add("attention", "masked", {"BACKENDS": attention.Backend(leaking, requires=lambda _device: [])})
    with pytest.raises(EnvironmentProblem, match=r"^attention=masked: .* Set attention=sdpa"):
        toys.train("leaking", *recipe, "attention=masked")
