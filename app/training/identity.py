"""Settings that determine the results of a run: a checkpoint is only resumed with the same values."""

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

COMPARED = "compared"  # the resolved value itself
SETTLED = "settled"  # the result of the value: `Plan.identity`
FREE = "free"  # may differ: location, speed and memory of the same computation

# by key of a run, or by section
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
    "model.tokenizer": SETTLED,  # by the tokens, like all keys that determine them
    "model.add_tokens": SETTLED,
    "model.vocab_size": COMPARED,
    "model.chat_template": SETTLED,
    "model.template_options": SETTLED,
    "model.norm": COMPARED,
    "model.rope": COMPARED,
    "model.rope_factor": COMPARED,
    "model.rope_original": COMPARED,
    "model.trust_remote_code": FREE,
    "model.licence_page": FREE,
    "model.architecture": SETTLED,  # by a hash, if the weights are random
    "model.suggest": FREE,
    "dataset": SETTLED,  # by the tokens
    "task": COMPARED,
    "preference": COMPARED,
    "batching": SETTLED,  # by the rows or bins of a step
    "batching.order": COMPARED,
    "adapter": COMPARED,
    "adapter.start": SETTLED,  # by the hash of the adapter weights
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
    "training.tile": FREE,
    "training.max_bad_steps": FREE,
    "training.profile_step": FREE,
    "eval": FREE,
    "checkpoint": FREE,
    "record": FREE,
    "launch": FREE,
}

_BASE = "the base (as a hash)"


def role_of(key: str) -> str | None:
    """Return the role of a schema key, else of the nearest section with a role."""
    section = key.rpartition(".")[0]
    return ROLES.get(key) or (role_of(section) if section else None)


def compared_settings(run: RunConfig, precision: str) -> dict[str, Any]:
    """Return the settings compared by value, by key. `precision` is the resolved one."""
    run = replace(run, precision=replace(run.precision, kind=precision))
    values = {key: attrgetter(key)(run) for key in leaf_keys(RunConfig) if role_of(key) == COMPARED}
    if run.optimizer.in_backward:
        del values["training.clip"]  # not available with updates in the backward pass, to which a run may change
    return {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in values.items()}


def changed_settings(saved: RunConfig, run: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the numbers, switches and kinds of `run` that a resume of `saved` cannot change, with both values.

    Names such as `auto` and lists may be stored as what they stood for; `Checkpoints.load` compares those.
    """
    before, now = (compared_settings(config, config.precision.kind) for config in (saved, run))
    changed = {key: (before[key], value) for key, value in now.items() if key in before and value != before[key]}
    return {
        key: values
        for key, values in changed.items()
        if all(isinstance(value, int | float) for value in values) or (key.endswith(".kind") and "auto" not in values)
    }


def base_hash(model: ModelConfig, fingerprint: str | None) -> dict[str, str]:
    """Return the hash of the base weights, or of the architecture of random ones; empty if unavailable."""
    architecture = json.dumps(model.architecture, sort_keys=True).encode()
    digest = hashlib.sha256(architecture).hexdigest() if model.weights == "random" else fingerprint
    return {} if digest is None else {_BASE: digest[:12]}


def start_hash(adapter: AdapterConfig) -> dict[str, str]:
    """Return the hash of the start adapter if its folder still exists."""
    folder = start_folder(adapter)
    weights = None if folder is None else folder / ADAPTER_WEIGHTS
    return {} if weights is None or not weights.is_file() else {"adapter.start (as a hash)": sha256(weights)[:12]}


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the differences between a checkpoint and a run, in the keys that both have (a hash needs its files)."""
    keys = saved.keys() & current.keys()
    if _BASE in keys:
        keys -= {"model.path"}  # the same weights in another place
    return [
        f"{key}: the checkpoint has {saved[key]}, this run has {current[key]}"
        for key in sorted(keys)
        if saved[key] != current[key]
    ]
