"""Bases packed tensor by tensor and sharded while loading: equal numbers, bounded memory."""

import ctypes
import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from app.distributed.fsdp import whole_tensors
from app.distributed.process_group import Runtime
from app.model.build import build_training_model
from app.model.training_model import TrainingModel
from app.tasks.table import loss_of
from tests.conftest import REPO
from tests.harness.peak import Peak
from tests.harness.processes import ProcessesByCount
from tests.harness.python import printed_by
from tests.model import small
from tests.training.conftest import sections_of, small_run


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


FILES = "files"  # of the model that ships, or of the folder named after it, in place of random weights
TIED = "model.architecture.tie_word_embeddings=true"
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
LARGE = (
    "model.architecture.num_hidden_layers=16",
    "model.architecture.hidden_size=512",
    "model.architecture.intermediate_size=1376",
)


def built(runtime: Runtime, words: tuple[str, ...], *, sharded: bool) -> TrainingModel:
    run = small_run(*(text for text in words if not text.startswith(FILES)), "parallel=fsdp")
    for text in words:
        if text.startswith(FILES):
            path = text.removeprefix(FILES).strip() or run.model.path
            run = replace(run, model=replace(run.model, path=path, weights="pretrained"))
    sharding = runtime.sharding(run.parallel) if sharded else None
    return build_training_model(sections_of(run), loss_of(run), runtime.device, run.seed, "base", sharding)


def state_of(model: TrainingModel) -> dict[str, Tensor]:
    """Parameters and buffers, whole."""
    network = model.network
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return dict(whole_tensors({name: each.detach() for name, each in named.items()}))


def differences(runtime: Runtime, words: tuple[str, ...]) -> list[str]:
    """Tensors that do not begin alike to the last bit, after what a start compares on gathered weights."""
    whole, shards = (state_of(built(runtime, words, sharded=each)) for each in (False, True))
    assert whole.keys() == shards.keys()
    return [name for name, each in whole.items() if not _same(each, shards[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=full",),
        ("recipe=full", TIED),
        ("recipe=lora", "precision=bf16"),
        ("recipe=qlora",),
        ("recipe=lora", "quantization=fp8", "model.architecture.hidden_size=64"),
        ("recipe=lora", "quantization=int8"),
        ("recipe=full", FILES),
        ("recipe=qlora", FILES),
    ],
    ids=" ".join,
)
def test_sharded_model_begins_with_numbers_of_one_process(words: tuple[str, ...], processes: ProcessesByCount) -> None:
    assert processes(3).run(differences, words) == [[]] * 3


@pytest.mark.parametrize("recipe", ["recipe=full", "recipe=lora"])
def test_stacks_of_experts_are_sharded_as_they_are_read(
    recipe: str, processes: ProcessesByCount, tmp_path: Path
) -> None:
    """The files have a tensor for each expert."""
    small.built("qwen3_moe", "sdpa").save_pretrained(str(tmp_path))
    assert processes(3).run(differences, (recipe, f"{FILES} {tmp_path}")) == [[]] * 3


def memory_of_loading(runtime: Runtime, words: tuple[str, ...]) -> list[float]:
    """The peak above the start over the bytes of the whole model: sharded, then whole, as a control."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once
    built(runtime, words[: -len(LARGE)], sharded=True)  # imports and first calls are no part of a model
    found = []
    for sharded in (True, False):
        gc.collect()
        libc.malloc_trim(0)  # freed memory that stays with the process would hide as much of the next model
        with Peak(resident) as peak:
            model = built(runtime, words, sharded=sharded)
        whole = sum(each.numel() * each.element_size() for each in model.network.parameters())
        found.append(peak.above / whole)
        del model
    return found


def resident() -> int:
    """Memory of this process's own: pages of files are not counted."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.parametrize("recipe", ["recipe=full", "recipe=lora"])
def test_no_process_holds_the_whole_model_while_it_is_loaded(recipe: str, processes: ProcessesByCount) -> None:
    for sharded, whole in processes(3).run(memory_of_loading, (recipe, *LARGE)):
        assert sharded < 0.67, "a third, and what the checks of a start gather: the root and one layer"
        assert whole > 0.95
