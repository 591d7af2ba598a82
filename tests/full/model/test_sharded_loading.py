"""A model that is sharded while it is loaded begins with the numbers of one process, and no process holds all of it."""

import ctypes
import gc
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from app.distributed.fsdp import whole_tensors
from app.distributed.process_group import Runtime
from app.model import load_base
from app.model.build import build_training_model
from app.model.training_model import TrainingModel
from tests.harness.peak import Peak
from tests.harness.processes import ProcessesByCount
from tests.training.conftest import sections_of, small_run

FILES = "files"  # of the model that ships, in place of random weights
LOADED_WHOLE = "loaded whole"  # as if the files had other names than the modules
TIED = "model.architecture.tie_word_embeddings=true"
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
LARGE = (
    "model.architecture.num_hidden_layers=16",
    "model.architecture.hidden_size=512",
    "model.architecture.intermediate_size=1376",
)


def built(runtime: Runtime, words: tuple[str, ...], *, sharded: bool) -> TrainingModel:
    run = small_run(*(text for text in words if text not in {FILES, LOADED_WHOLE}), "parallel=fsdp")
    if FILES in words:
        run = replace(run, model=replace(run.model, weights="pretrained"))
    sharding = runtime.sharding(run.parallel) if sharded else None
    with pytest.MonkeyPatch.context() as patch:
        if LOADED_WHOLE in words and sharded:
            patch.setattr(load_base, "can_be_filled", lambda *_: False)
        model = build_training_model(sections_of(run), runtime.device, run.seed, "base", sharding)
    said = any("each process loads all of them" in remark for remark in model.remarks())
    assert said == (LOADED_WHOLE in words and sharded)
    return model


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
        ("recipe=qlora", FILES, LOADED_WHOLE),
        ("recipe=full", FILES, LOADED_WHOLE),
    ],
    ids=" ".join,
)
def test_sharded_model_begins_with_numbers_of_one_process(words: tuple[str, ...], processes: ProcessesByCount) -> None:
    assert processes(3).run(differences, words) == [[]] * 3


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
