"""A finished run as a model to ask: by transformers and peft alone, as anybody else would load it."""

import json
from pathlib import Path
from typing import Any

import torch

from app.config.schema import ModelConfig
from app.errors import CheckpointError
from app.model.adapter import quiet_peft
from app.model.source import fetch_folder, require_weights

_ADAPTER = "adapter_config.json"


def load_tuned(run: Path, model: ModelConfig, *, adapter: bool) -> Any:
    """The tuned model of a run folder; `adapter=False` leaves the adapter off."""
    final = run / "final"
    if not (final / _ADAPTER).is_file():
        if not adapter:
            raise CheckpointError(f"adapter=false: {final} is a whole model, its base is not in it.")
        return _load(final, str(final), model)
    lm = _load(_base_folder(run, final, model), model.path, model)
    if not adapter:
        return lm
    from peft import PeftModel

    with quiet_peft():
        return PeftModel.from_pretrained(lm, str(final)).eval().get_base_model()


def load_tuned_tokenizer(final: Path) -> Any:
    """The tokenizer that was saved with the weights, chat template included."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(final), local_files_only=True)


def _base_folder(run: Path, final: Path, model: ModelConfig) -> Path:
    """Beside the adapter if it was random (a moved run keeps it), else where the run took it from."""
    if (run / "base").is_dir():
        return run / "base"
    if model.weights == "random":
        named = json.loads((final / _ADAPTER).read_text())["base_model_name_or_path"]
        raise CheckpointError(
            f"run={run}: its base of random weights is not there any more (it was {named})."
        )
    return fetch_folder(model, model.path, with_weights=True)


def _load(folder: Path, path: str, model: ModelConfig) -> Any:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    require_weights(folder, path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lm = AutoModelForCausalLM.from_pretrained(
        str(folder),
        dtype="auto",
        device_map={"": device},
        trust_remote_code=model.trust_remote_code,
        local_files_only=True,
    )
    return lm.eval()
