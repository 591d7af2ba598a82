"""What the numbers of a run come from besides its configuration: the machine, and the content of what it reads."""

from typing import Any

import torch

from app.config.dataset import has_chats
from app.config.schema import RunConfig
from app.data.prepare import Data, prepare
from app.distributed.process_group import default_device
from app.model.fingerprint import base_fingerprint
from app.model.source import fetch_folder
from app.model.tokenizer import load_tokenizer, tokenizer_hash
from app.training.limits import within_positions
from app.training.resolve import with_format


def hardware() -> dict[str, str | None]:
    """What decides which kernels compute."""
    device = default_device()
    return {
        "device": device.type,
        "gpu": torch.cuda.get_device_name() if device.type == "cuda" else None,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def content_hashes(data: Data, tokenizer: Any) -> dict[str, str | None]:
    """Of the tokens of both splits, and of what makes them."""
    return {
        "train": data.train.fingerprint,
        "eval": None if data.eval is None else data.eval.fingerprint,
        "tokenizer": tokenizer_hash(tokenizer),
    }


def origin_now(run: RunConfig) -> dict[str, Any]:
    """The same of a run that is about to start on this machine, in the words of a manifest."""
    run, _ = with_format(within_positions(run, lambda _note: None))
    tokenizer = load_tokenizer(run.model, needs_template=has_chats(run.dataset))
    data = prepare(run.dataset, tokenizer, run.cache_dir, classes=run.task.labels)
    if run.model.weights == "pretrained":
        fetch_folder(run.model, run.model.path, with_weights=True)
    hashes = {**content_hashes(data, tokenizer), "base": base_fingerprint(run.model)}
    return {"hardware": hardware(), "hashes": hashes}
