"""Other methods of PEFT than LoRA, by their names: attached to the filled base, with fields of PEFT's own classes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import nn

from app.adapters.adapter_method import AdapterMethod
from app.config.adapters import INDIVISIBLE, RESERVED_FIELDS, is_plain
from app.config.did_you_mean import did_you_mean
from app.config.peft_methods import METHODS, SHARED
from app.errors import ConfigError, gist, refuse
from app.layers.quantization import is_conv1d


class PeftAdapter(AdapterMethod):
    """One method of `METHODS`: PEFT says what is trained, where its tensors lie, and how it is merged."""

    trained, of_text_parts = (), False

    @property
    def name(self) -> str:
        return self.config.method.upper()

    @classmethod
    def keys_of(cls, peft_type: str) -> Mapping[str, Callable[[Any], bool]] | None:
        if peft_type not in METHODS:
            return None
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

        own = {each.name for each in fields(PEFT_TYPE_TO_CONFIG_MAPPING[peft_type])} - RESERVED_FIELDS
        return dict.fromkeys(own, is_plain)

    @property
    def of_norms(self) -> bool:
        return METHODS[self.name].of_norms

    @property
    def _mark(self) -> str:
        """The part of names that begins a tensor of the method."""
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        return f".{PEFT_TYPE_TO_TUNER_MAPPING[self.name].prefix}"

    @property
    def moves_in(self) -> Mapping[int, str]:
        """In the second step, as what begins at zero keeps gradients from other tensors of its layer in the first."""
        return {2: self._mark}

    def trained_of(self, layers: Iterable[str], names: Iterable[str]) -> set[str]:
        """Refuse layers that PEFT passes over without a word."""
        found = {name for name in names if self._mark in f".{name}"}
        left = set(layers) - {name.partition(self._mark)[0] for name in found}
        if left and METHODS[self.name].indivisible != SHARED:
            raise ConfigError(
                f"adapter.method={self.name}: PEFT leaves layers such as {min(left)} as they are. Name others in "
                "adapter.targets, or set adapter=lora."
            )
        return found

    def usual_targets(self, lm: Any) -> Collection[str]:
        return self._in_peft("TARGET", lm)

    def _in_peft(self, role: str, lm: Any) -> Collection[str]:
        """Ends of names that PEFT has for a kind of model; none for a kind that it does not know."""
        from peft.utils import constants

        table = f"TRANSFORMERS_MODELS_TO_{self.name.replace('_', '')}_{role}_MODULES_MAPPING"
        found: Collection[str] = getattr(constants, table, {}).get(lm.config.model_type) or ()
        return found

    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """Refuse fields that the method does not have."""
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

        kind = PEFT_TYPE_TO_CONFIG_MAPPING[self.name]
        known = {each.name for each in fields(kind)}
        refuse(self._field_problems(known - RESERVED_FIELDS))
        given = {key: value for key, value in shared.items() if key in known}
        lacking = [key for key, value in shared.items() if key not in known and value]
        if "ensure_weight_tying" in lacking:
            raise ConfigError(
                f"adapter.train_whole: the embedding is tied to the head, and with adapter.method={self.name} PEFT "
                "trains them apart. Leave it out, or set adapter=lora."
            )
        if lacking:
            raise ConfigError(f"adapter.method={self.name}: PEFT has no {lacking[0]} with it. Set adapter=lora.")
        if "fan_in_fan_out" in known:
            given["fan_in_fan_out"] = any(is_conv1d(lm.get_submodule(layer)) for layer in layers)
        if "feedforward_modules" in known:  # IA3 scales the inputs of a layer that ends a block
            ends = self._in_peft("FEEDFORWARD", lm)
            given["feedforward_modules"] = [n for n in given["target_modules"] if n.rpartition(".")[2] in ends]
        return kind(**given | self.config.fields)

    def _field_problems(self, known: Iterable[str]) -> Iterator[str]:
        for name in self.config.fields:
            if name in RESERVED_FIELDS:
                keys = "adapter.targets, adapter.layers and adapter.train_whole"
                yield f"adapter.fields: {name} is set by the run, from {keys} among others. Leave it out."
            elif name not in known:
                yield f"adapter.fields: {name} is no setting of {self.name} in PEFT.{did_you_mean(name, known)}"

    def require_divisible(self) -> None:
        cause = METHODS[self.name].indivisible
        if cause:
            raise ConfigError(INDIVISIBLE.format(self.config.method, cause))

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """What PEFT cannot attach is a problem of the method's settings and of this model."""
        try:
            yield
        except (ValueError, TypeError, RuntimeError, AssertionError) as fault:
            raise ConfigError(
                f"adapter.method={self.name}: PEFT cannot adapt this model so ({gist(fault)}). Change adapter.fields "
                "or adapter.targets, or set adapter=lora."
            ) from fault


def is_norm(module: nn.Module) -> bool:
    """Whether it has a weight for each number of a vector, as LayerNorm and RMSNorm."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 1 and not any(True for _ in module.children())
