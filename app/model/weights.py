"""The base model: loaded from safetensors, or built from the numbers in its YAML."""

from pathlib import Path
from typing import Any

import torch

from app.config.schema import ModelConfig
from app.errors import ConfigError, EnvironmentProblem
from app.model.source import fetch_folder, require_weights


def load_base(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, attention: str, seed: int
) -> Any:
    """A causal language model of transformers on `device`, its weights in `dtype`."""
    if config.weights == "random":
        return _random(config, dtype, device, attention, seed)
    folder = fetch_folder(config, config.path, with_weights=True)
    require_weights(folder, config.path)
    return _pretrained(config, folder, dtype, device, attention)


def build_on_meta(config: ModelConfig, attention: str) -> Any:
    """The same model without memory, for counting: from the folder's config.json if it is at hand, else from the YAML."""
    folder = Path(config.path)
    numbers = _local_config(config, folder) if config.weights == "pretrained" and folder.is_dir() else None
    with torch.device("meta"):
        return _from_config(config, numbers or _numbers(config), torch.float32, attention)


def _random(config: ModelConfig, dtype: torch.dtype, device: torch.device, attention: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return _from_config(config, _numbers(config), dtype, attention)


def _numbers(config: ModelConfig) -> Any:
    from transformers import AutoConfig

    numbers = dict(config.architecture)
    kind = str(numbers.pop("model_type"))
    try:
        return AutoConfig.for_model(kind, **numbers)
    except (ValueError, TypeError, KeyError) as fault:
        raise ConfigError(
            f"model.architecture (model_type: {kind}) is not what transformers takes: {fault}"
        ) from fault


def _local_config(config: ModelConfig, folder: Path) -> Any:
    from transformers import AutoConfig

    require_weights(folder, config.path)
    return AutoConfig.from_pretrained(
        str(folder), trust_remote_code=config.trust_remote_code, local_files_only=True
    )


def _from_config(config: ModelConfig, numbers: Any, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        numbers, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
    )


def _pretrained(
    config: ModelConfig, folder: Path, dtype: torch.dtype, device: torch.device, attention: str
) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            trust_remote_code=config.trust_remote_code,
            local_files_only=True,
            device_map={"": device},
        )
    except (OSError, ValueError, SafetensorError, RuntimeError) as fault:
        if isinstance(fault, torch.OutOfMemoryError):
            raise
        reason = (str(fault).strip() or type(fault).__name__).splitlines()[0][:300]
        raise EnvironmentProblem(
            f"model.path={config.path}: {folder} cannot be loaded ({reason})."
        ) from fault
