"""Tiny models that read more than text."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.small import wide_numbers

SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SIGLIP |= {"image_size": 28, "patch_size": 14}
QWEN = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4, "out_hidden_size": 64}
QWEN |= {"num_position_embeddings": 16, "patch_size": 14}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": wide_numbers("gemma3_text"),
        "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
        "mm_tokens_per_image": 4,
        "boi_token_index": 60,
        "eoi_token_index": 61,
        "image_token_index": 62,
    },
    "mistral3": {
        "text_config": wide_numbers("mistral"),
        "vision_config": {"model_type": "pixtral", **SIGLIP},
        "image_token_index": 62,
    },
    "qwen3_5": {"text_config": wide_numbers("qwen3_5_text"), "vision_config": QWEN},
    # has no class for its text part
    "qwen3_vl": {
        "text_config": wide_numbers("qwen3_vl_text", head_dim=16, rope_parameters=SECTIONS),
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0]},
    },
}


def saved_whole(numbers: Any, folder: Path) -> Any:
    """A model with random weights, biases and norms too, in a folder."""
    torch.manual_seed(0)
    whole = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(numbers)]._from_config(numbers).eval()
    for parameter in whole.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    whole.save_pretrained(str(folder))
    return whole
