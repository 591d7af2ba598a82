"""What is printed of an adapter in vLLM, by keys that PEFT writes."""

from typing import Any

import pytest
from peft import LoraConfig

from app.tracking.vllm import in_vllm


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"r": 16}, "takes it with --enable-lora (rules"),
        ({"r": 40, "use_rslora": True}, "takes it with --enable-lora --max-lora-rank 64 (rules"),
        (
            {"r": 8, "trainable_token_indices": {"embed_tokens": [3, 4]}},
            "--enable-lora --max-lora-trainable-tokens 2 (",
        ),
        ({"r": 600}, "refuses rank 600, above 512\nuse kind=merged"),
        ({"use_dora": True, "modules_to_save": ["lm_head"]}, "refuses DoRA\nrefuses fully trained modules, lm_head"),
        ({"bias": "all"}, "refuses trained biases"),
        ({"alpha_pattern": {"q_proj": 4}}, "ignores alphas by layer\nuse kind=merged"),
        ({"target_parameters": ["experts.down_proj"]}, "ignores stacked experts, experts.down_proj"),
    ],
)
def test_adapter_meets_the_rules_of_vllm(settings: dict[str, Any], expected: str) -> None:
    assert expected in in_vllm(LoraConfig(target_modules=["q_proj"], **settings).to_dict() | {"peft_type": "LORA"})


def test_other_method_is_refused() -> None:
    assert in_vllm({"peft_type": "IA3"}).startswith("refuses PEFT type IA3\n")
