"""python -m scripts.make_bytes: write the bytes of each optimizer in docs/memory.md, counted on fake tensors."""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from app.config.conf_files import choices_by_group
from app.config.load import compose_run
from app.distributed.process_group import HostGroup, Runtime
from app.memory.fake_tensors import PLANNED_AS, FakeTensorFallbacks, MetaModel, PagedStates, materialize
from app.model.build import assemble
from app.optim.optimizers import ordinary
from app.tasks.table import loss_of
from app.training.auto_settings import Choices, sections_of
from app.training.setup import stepper_of
from app.training.storage_counter import kept_bytes
from scripts.make_keys import DOCS, with_table

_BF16, _IN_BACKWARD = "precision.trained=bf16", "optimizer.in_backward=true training.clip=0"
_SETTINGS = (
    *choices_by_group()["optimizer"],
    "adamw_8bit optimizer.embedding_states=32bit",
    *(
        f"{kind} {more}"
        for kind in ("adamw", "adamw_8bit")
        for more in (_BF16, _IN_BACKWARD, f"{_BF16} {_IN_BACKWARD}")
    ),
)


def memory_page() -> str:
    """Return the page with a row for each optimizer and some settings."""
    head = ("`optimizer=`", "weights", "gradients", "states", "total", "states in CPU RAM")
    return with_table("memory.md", "make_bytes", head, map(_row, _SETTINGS))


def _row(settings: str) -> Iterator[str]:
    """Yield the cells: bytes per parameter in full fine-tuning of the 8B shape."""
    kind, *more = settings.split()
    shape = ("model=llama", "model.weights=random", "recipe=full", "precision=bf16")
    run = compose_run([*shape, f"optimizer={PLANNED_AS.get(kind, kind)}", *more])
    sections = sections_of(run, Choices("bf16", "sdpa"))
    meta_model, paged = MetaModel(sections, "eager"), PagedStates()
    network = meta_model.network(meta_model.depth)
    one_process = Runtime(None, torch.device("cpu"), HostGroup(rank=0, count=1), threads=1)
    with ExitStack() as modes:
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(FakeTensorFallbacks())  # type: ignore[no-untyped-call]
        materialize(network, sections)
        stepper = stepper_of(assemble(network, sections, loss_of(run), None), run, one_process, "bf16")
        paged.attach(ordinary(stepper.optimizer))
        stepper.allocate_states()
        sizes = kept_bytes(stepper.model, stepper.optimizer)
    sizes["optimizer_states"] -= paged.host_bytes
    parts = [sizes[part] for part in ("trained_weights", "gradients", "optimizer_states")]
    count = sum(parameter.numel() for parameter in stepper.model.trained().values())
    yield f"`{settings}`"
    yield from (f"{size / count:.2f}" for size in (*parts, sum(parts)))
    yield f"{paged.host_bytes / count:.2f}" if paged.host_bytes else ""


PAGES = {DOCS / "memory.md": memory_page}

if __name__ == "__main__":
    for file, page in PAGES.items():
        file.write_text(page(), encoding="utf-8")
