"""A base packed tensor by tensor is the one that transformers packs, and its files are not in memory together."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import REPO
from tests.harness.python import printed_by


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base of about 105 MB in six files."""
    config = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=1024,
        intermediate_size=2752,
        vocab_size=4096,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(str(tmp_path), max_shard_size="18MB")
    return tmp_path


def measured(folder: Path, reader: str) -> dict[str, Any]:
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # what is freed goes back to the system
    arguments = ("-m", "tests.full.model.load_memory", str(folder), reader)
    found: dict[str, Any] = json.loads(printed_by(*arguments, cwd=REPO, env=os.environ | at_once))
    return found


def test_load_base_quantized_keeps_files_out_of_memory(folder: Path) -> None:
    ours, theirs = (measured(folder, reader) for reader in ("ours", "transformers"))
    assert ours["digest"] == theirs["digest"]
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    assert theirs["peak"] - ours["peak"] > 0.5 * (sum(sizes) - max(sizes))
