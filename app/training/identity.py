"""Which settings decide the numbers of a run: a checkpoint is continued only where these are what they were."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from app.config.adapters import ADAPTER_WEIGHTS, start_folder
from app.config.schema import AdapterConfig, ModelConfig, RunConfig
from app.config.validate import leaf_keys
from app.files import sha256

COMPARED = "compared"  # the value itself, as it came out
SETTLED = "settled"  # what the value came to: `Plan.identity`
FREE = "free"  # may differ: where, how fast and in how much memory the same numbers are made

# of every key of a run, or of its section
ROLES = {
    "output_dir": FREE,
    "seed": COMPARED,
    "resume": FREE,
    "varied_from": FREE,
    "dry_run": FREE,
    "cache_dir": FREE,
    "model.path": SETTLED,  # by the hash of the weights
    "model.revision": SETTLED,  # the same
    "model.weights": COMPARED,
    "model.tokenizer": SETTLED,  # by the tokens, as all that they are made of
    "model.add_tokens": SETTLED,
    "model.vocab_size": COMPARED,
    "model.chat_template": SETTLED,
    "model.template_options": SETTLED,
    "model.norm": COMPARED,
    "model.trust_remote_code": FREE,
    "model.licence_page": FREE,
    "model.architecture": SETTLED,  # by a hash, where the weights are random
    "model.suggest": FREE,
    "dataset": SETTLED,  # by the tokens
    "task": COMPARED,
    "preference": COMPARED,
    "batching": SETTLED,  # by the rows or bins of a step
    "batching.order": COMPARED,
    "adapter": COMPARED,
    "adapter.start": SETTLED,  # by the hash of its weights
    "quantization": COMPARED,
    "optimizer": COMPARED,
    "optimizer.in_backward": FREE,
    "schedule": COMPARED,
    "attention": FREE,
    "compile": FREE,
    "precision": COMPARED,
    "parallel": FREE,
    "tracker": FREE,
    "training.epochs": SETTLED,  # by the number of steps
    "training.max_steps": SETTLED,
    "training.stop_after": FREE,
    "training.freeze": COMPARED,
    "training.neftune": COMPARED,
    "training.clip": COMPARED,
    "training.recompute": FREE,
    "training.rehearse": FREE,
    "training.offload": FREE,
    "training.max_bad_steps": FREE,
    "training.profile_step": FREE,
    "eval": FREE,
    "checkpoint": FREE,
    "record": FREE,
    "launch": FREE,
}

_BASE = "the base (as a hash)"


def role_of(key: str) -> str | None:
    """The role of a key of the schema: its own, else that of its section."""
    section = key.rpartition(".")[0]
    return ROLES.get(key) or (role_of(section) if section else None)


def compared_settings(run: RunConfig, precision: str) -> dict[str, Any]:
    """Settings that are compared as they are, by the key to type. `precision` is what it came out to."""
    run = replace(run, precision=replace(run.precision, kind=precision))
    values = {key: attrgetter(key)(run) for key in leaf_keys(RunConfig) if role_of(key) == COMPARED}
    if run.optimizer.in_backward:
        del values["training.clip"]  # which steps in the backward pass cannot have, and a run may change to them
    return {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}


def base_hash(model: ModelConfig, fingerprint: str | None) -> dict[str, str]:
    """The hash of the base's weights, or of what they are drawn for; nothing where they are not at hand."""
    drawn = json.dumps(model.architecture, sort_keys=True).encode()
    known = hashlib.sha256(drawn).hexdigest() if model.weights == "random" else fingerprint
    return {} if known is None else {_BASE: known[:12]}


def start_hash(adapter: AdapterConfig) -> dict[str, str]:
    """The hash of the adapter that a run goes on from, while its folder is there."""
    folder = start_folder(adapter)
    weights = None if folder is None else folder / ADAPTER_WEIGHTS
    return {} if weights is None or not weights.is_file() else {"adapter.start (as a hash)": sha256(weights)[:12]}


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return the differences between a checkpoint and a run, in the keys that both have (a hash needs its files)."""
    keys = saved.keys() & own.keys()
    if _BASE in keys:
        keys -= {"model.path"}  # the same weights at another place
    return [
        f"{key}: the checkpoint has {saved[key]}, this run has {own[key]}"
        for key in sorted(keys)
        if saved[key] != own[key]
    ]
