"""The base of a run as its config.json, or the numbers in its YAML, describe it: no weight is read."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from app.config.did_you_mean import did_you_mean
from app.config.schema import ModelConfig
from app.config.tasks import Task
from app.errors import ConfigError, EnvironmentProblem, gist, refuse
from app.model.source import REMOTE_CODE, fetch_folder, folder_at_hand, local_place, read_config, require_weights
from app.model.supported_models import require_kind, require_structure
from app.model.tasks import configured, model_class
from app.model.training_model import first_position


@dataclass(frozen=True)
class BaseModel:
    """The base for a task. Each fact is found when it is first asked for, and kept."""

    config: ModelConfig
    task: Task
    _on_meta: dict[tuple[str, torch.dtype], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def stored(self) -> dict[str, Any]:
        """What stands in the config.json of the model, or would for random weights."""
        if self.config.weights == "random":
            return self.config.architecture
        return read_config(fetch_folder(self.config, self.config.path, with_weights=False), self.config.path)

    @cached_property
    def numbers(self) -> Any:
        """What transformers makes of its own config.json if that is at hand, else of the YAML."""
        folder = folder_at_hand(self.config) if self.config.weights == "pretrained" else None
        if folder is None:
            return numbers_in_yaml(self.config, self.task)
        return numbers_in_folder(self.config, self.task, folder)

    def on_meta(self, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
        """The model without memory or adapter, the same one each time: change a copy of it."""
        if (attention, dtype) not in self._on_meta:
            place = local_place(self.config.path)
            if self.config.weights == "pretrained" and place.is_dir():
                require_weights(place, self.config.path)
            require_kind(self.config, self.task, self.numbers)
            with torch.device("meta"):  # transformers writes attention and dtype into the numbers
                lm = from_numbers(self.config, self.task, deepcopy(self.numbers), dtype, attention)
            require_structure(self.config, self.task, lm)
            self._on_meta[attention, dtype] = lm
        return self._on_meta[attention, dtype]

    @property
    def positions(self) -> int | None:
        """The longest row that config.json knows positions for; None where it does not say."""
        positions = self.stored.get("max_position_embeddings") or self.stored.get("n_positions")
        return positions if isinstance(positions, int) else None

    def longest_row(self, wanted: int) -> int:
        """`wanted` tokens, or as many as there are positions for without those that the model leaves unused."""
        if self.positions is None:
            return wanted
        padding = getattr(self.numbers, "pad_token_id", None)  # a bound: no model is built where rows fit anyway
        if wanted <= self.positions - (0 if padding is None else int(padding) + 1):
            return wanted
        return min(wanted, self.positions - first_position(self.on_meta()))

    def vocabulary(self, largest: int) -> int:
        """How many ids the embedding has a row for; as config.json says it where that holds the `largest` one."""
        told = self.stored.get("vocab_size")
        if isinstance(told, int) and largest < told:
            return told
        count: int = self.on_meta().get_input_embeddings().num_embeddings
        return count

    @cached_property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to those after them; the model decides where the task takes either."""
        if self.task.sees != "either":
            return self.task.sees == "both"
        return not any(getattr(module, "is_causal", False) for module in self.on_meta().modules())


def numbers_in_yaml(config: ModelConfig, task: Task) -> Any:
    """The configuration of transformers for the architecture in the YAML."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    numbers = dict(config.architecture)
    kind = str(numbers.pop("model_type", None))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"model.architecture.model_type={kind} is not a kind that transformers knows."
            f"{did_you_mean(kind, sorted(CONFIG_MAPPING))}"
        )
    refuse(
        f"model.architecture.{own}={numbers[own]} and model.architecture.{name}={numbers[name]} are one number of "
        f"model_type={kind}. Leave {own} out, and set model.architecture.{name}."
        for name, own in CONFIG_MAPPING[kind].attribute_map.items()  # of two names transformers would take one
        if name in numbers and own in numbers and numbers[name] != numbers[own]
    )
    try:
        return configured(task, AutoConfig.for_model(kind, **numbers))
    except (ValueError, TypeError, KeyError, StrictDataclassError) as fault:
        reason = gist(fault.__cause__ or fault)
        raise ConfigError(
            f"model.architecture (model_type: {kind}) is not what transformers takes: {reason}"
        ) from fault


def numbers_in_folder(config: ModelConfig, task: Task, folder: Path) -> Any:
    """The configuration of transformers in a local folder, for the labels of the run."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    read_config(folder, config.path)
    try:
        numbers = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as fault:
        raise EnvironmentProblem(
            f"model.path={config.path}: {folder / 'config.json'} is not a configuration that this transformers can "
            f"use ({gist(fault)}). {REMOTE_CODE}"
        ) from fault
    _require_no_other_classes(config, task, numbers)
    return configured(task, numbers)


def _require_no_other_classes(config: ModelConfig, task: Task, numbers: Any) -> None:
    """As many classes of other names would be taken for those of the run; one of another size is drawn anew."""
    is_classifier = any("ForSequenceClassification" in name for name in numbers.architectures or ())
    known = [str(numbers.id2label[at]) for at in sorted(numbers.id2label)] if is_classifier else []
    if task.labels and len(known) == len(task.labels) and known != list(task.labels):
        raise ConfigError(
            f"model.path={config.path}: it has a classifier already, of {', '.join(known)}, and the labels of this run "
            f"are {', '.join(task.labels)}. Give the model that it was made from, or rows with its labels and "
            f"task.labels=[{','.join(known)}]."
        )


def from_numbers(config: ModelConfig, task: Task, numbers: Any, dtype: torch.dtype, attention: str) -> Any:
    """The model of the task's class, where torch puts new modules."""
    return model_class(task).from_config(
        numbers, dtype=dtype, attn_implementation=attention, trust_remote_code=config.trust_remote_code
    )
