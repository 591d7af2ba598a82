"""Adapter methods: the interface, LoRA and its variants, and other PEFT methods by name."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from app.adapters.lora_inits import LATE, Lost, Rows, begin
from app.base.base_weights import Put, in_memory
from app.config.adapters import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    INDIVISIBLE,
    LAYER_NAME,
    METHODS,
    RESERVED_FIELDS,
    SHARED,
    is_plain,
)
from app.config.schema import AdapterConfig
from app.config.validate import did_you_mean
from app.errors import ConfigError, gist, refuse
from app.layers.experts import adapted_experts, layer_or_stack, stacks_of
from app.layers.quantization import is_conv1d


@dataclass(frozen=True, slots=True)
class AdapterMethod(ABC):
    """One PEFT method with its settings, as used to build, check, step, load and merge a model."""

    peft_type: ClassVar[str] = ""  # in adapter_config.json
    # the method's keys in that file, with checks of values that runs write
    written: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}
    of_text_parts: ClassVar[bool] = True  # whether it can be saved with the names of a multimodal model

    config: AdapterConfig

    @classmethod
    def keys_of(cls, peft_type: str) -> Mapping[str, Callable[[Any], bool]] | None:
        """Return the method's keys in adapter_config.json with checks of their values; None for another method."""
        return cls.written if peft_type == cls.peft_type else None

    @property
    @abstractmethod
    def moves_in(self) -> Mapping[int, str]:
        """Name part of the parameters that need a gradient in each layer, by step (without skipped steps)."""

    @property
    @abstractmethod
    def trained(self) -> tuple[str, ...]:
        """Suffixes of trained parameter names, after the layer name."""

    @property
    def of_norms(self) -> bool:
        """Whether the method adapts norms instead of linear layers."""
        return False

    def trained_of(self, layers: Iterable[str], names: Iterable[str]) -> set[str]:  # noqa: ARG002
        """Return the names of the parameters to train; `names` are those that PEFT trains."""
        return {layer + end for layer in layers for end in self.trained}

    def usual_targets(self, lm: Any) -> Collection[str]:  # noqa: ARG002
        """Return name suffixes of the layers that are adapted by default; empty: all layers."""
        return ()

    @property
    def on_meta(self) -> bool:
        """Whether the adapter is attached to a base on meta and initialized after filling; else to a filled base."""
        return False

    @abstractmethod
    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """Return the PEFT configuration or raise ConfigError; `shared` are arguments of every method."""

    def require_divisible(self) -> None:  # noqa: B027
        """Raise ConfigError if the adapter cannot be sharded by layer, because layers share tensors."""

    def refusing(self) -> AbstractContextManager[None]:
        """Return a context that converts PEFT errors to a ConfigError."""
        return nullcontext()

    def draw(self, network: nn.Module, device: torch.device, put: Put) -> None:
        """Initialize an adapter that was attached on meta."""
        raise NotImplementedError("draw: the weights of an adapter that is attached on meta")

    @property
    def begin(self) -> Callable[[Any, Rows, Lost], str] | None:
        """Function that initializes a new adapter in a TrainingModel with a filled base; None: PEFT initializes it."""
        return None

    def lr_factor(self, name: str) -> float:  # noqa: ARG002
        """Return the learning rate of a trained parameter as a multiple of `optimizer.lr`."""
        return 1.0


# ---- lora


def _is_pattern(value: Any) -> bool:
    """Return whether it maps layer names to numbers; regular expressions as names might never end."""
    return isinstance(value, dict) and all(
        LAYER_NAME.fullmatch(name) and type(number) in (int, float) and number > 0 for name, number in value.items()
    )


def _without_order(pattern: Mapping[str, Any], layers: list[str]) -> dict[str, Any]:
    """Return a pattern with one name per layer: the longest of several that are suffixes of the layer name.

    PEFT takes the first and sorts them when saving, so a loaded adapter would have other scales than the trained one.
    """
    if not any(name.endswith(f".{other}") for name in pattern for other in pattern):
        return dict(pattern)
    fitting = {layer: [name for name in pattern if f".{layer}".endswith(f".{name}")] for layer in layers}
    return {layer: pattern[max(names, key=len)] for layer, names in fitting.items() if names}


def _is_token_rows(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(LAYER_NAME.fullmatch(name) and isinstance(ids, list) for name, ids in value.items())
        and all(type(token) is int and token >= 0 for ids in value.values() for token in ids)
    )


def save_as_update(folder: Path, start: Mapping[str, Tensor]) -> None:
    """Rewrite a saved adapter as the difference from `start`: [A; A0] and [B, -B0], with twice the rank.

    Scales do not change: alpha grows with the rank, or with its square root for rsLoRA.
    """
    weights, config = load_file(folder / ADAPTER_WEIGHTS), json.loads((folder / ADAPTER).read_text())
    for name, initial in start.items():
        is_a = ".lora_A." in name
        weights[name] = torch.cat([weights[name], initial if is_a else -initial], dim=0 if is_a else 1)
    factor = 2**0.5 if config["use_rslora"] else 2
    config |= {"r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"], "init_lora_weights": True}
    config["rank_pattern"] = {name: 2 * rank for name, rank in config["rank_pattern"].items()}
    config["alpha_pattern"] = {name: factor * alpha for name, alpha in config["alpha_pattern"].items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True))


class Lora(AdapterMethod):
    """LoRA, W + alpha / r * B A. B is initialized to zero, so A has no gradient until B has changed."""

    peft_type = "LORA"
    written: ClassVar = {
        **dict.fromkeys(
            ("fan_in_fan_out", "use_rslora", "use_dora", "ensure_weight_tying"), lambda value: isinstance(value, bool)
        ),
        "r": lambda value: type(value) is int and value > 0,
        **dict.fromkeys(("lora_alpha", "lora_dropout"), lambda value: type(value) in (int, float) and value >= 0),
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), _is_pattern),
        "trainable_token_indices": _is_token_rows,
        # inits that do not change the base
        "init_lora_weights": lambda value: value in (True, False, "gaussian", "orthogonal"),
    }
    moves_in: ClassVar = {1: ".lora_B.", 2: ".lora_A."}

    @property
    def trained(self) -> tuple[str, ...]:
        """Suffixes of A, B and DoRA's magnitudes."""
        ends = (".lora_A.default.weight", ".lora_B.default.weight")
        return (*ends, ".lora_magnitude_vector.default.weight") if self.config.dora else ends

    @property
    def on_meta(self) -> bool:
        """Whether initialization reads nothing from the base, except for copies of whole modules."""
        config = self.config
        return config.init == "default" and not config.dora and config.train_tokens in ([], "all")

    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """Return LoRA's configuration; refuse ranks above those of the layers and patterns that match no layer."""
        from peft import LoraConfig

        config, modules = self.config, [lm.get_submodule(layer) for layer in layers]
        stacks = stacks_of(lm) if config.experts else {}
        if config.experts and not stacks:
            raise ConfigError(
                f"adapter.experts=true: a model of kind {lm.config.model_type} has no stacked experts that "
                "transformers calls through its experts interface. Set adapter.experts=false."
            )
        sizes = [m.weight.shape if is_conv1d(m) else (m.in_features, m.out_features) for m in modules]
        self._require_possible(max(map(min, [*sizes, *(shape[1:] for shape in stacks.values())])))
        self._require_named(layers)
        if config.init == "loftq" and (getattr(lm.config, "quantization_config", None) or {}).get("load_in_4bit"):
            raise ConfigError(
                "adapter.init=loftq: the weights in model.path are already quantized, so their quantization error is "
                "unknown. Set adapter.init=eva or default, or set model.path to the unquantized model."
            )
        # of a base on meta only shapes are needed
        is_drawn = config.init in ("default", *LATE) or next(lm.parameters()).is_meta
        return LoraConfig(
            **shared,
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            use_rslora=config.rslora,
            use_dora=config.dora,
            rank_pattern=_without_order(config.rank_pattern, layers),
            alpha_pattern=_without_order(config.alpha_pattern, layers),
            init_lora_weights=True if is_drawn else config.init,
            fan_in_fan_out=any(map(is_conv1d, modules)),
            target_parameters=sorted({".".join(name.rsplit(".", 2)[-2:]) for name in stacks}) or None,
        )

    def _require_possible(self, highest: int) -> None:
        pattern = {f"rank_pattern.{name}": r for name, r in self.config.rank_pattern.items()}
        for key, r in {"r": self.config.r, **pattern}.items():
            if r > highest:
                raise ConfigError(
                    f"adapter.{key}={r}: the adapted layers of this model have a maximum rank of {highest:,}. Typical "
                    f"ranks are 8 to 128; set adapter.{key}={highest} or less."
                )

    def _require_named(self, layers: list[str]) -> None:
        ends = {name.split(".", depth)[-1] for name in layers for depth in range(name.count(".") + 1)}
        for key in ("rank_pattern", "alpha_pattern"):
            for name in getattr(self.config, key):
                if name not in ends:
                    raise ConfigError(
                        f"adapter.{key}: {name} is not an adapted layer or a suffix of one."
                        f"{did_you_mean(name, sorted(ends))}"
                    )

    @property
    def begin(self) -> Callable[[Any, Rows, Lost], str] | None:
        """Initialization from training rows or from the quantization error, for EVA, CorDA and LoftQ."""
        return partial(begin, self.config.init) if self.config.init in LATE else None

    def lr_factor(self, name: str) -> float:
        return self.config.lr_ratio if ".lora_B." in name else 1.0

    @torch.no_grad()
    def draw(self, network: nn.Module, device: torch.device, put: Put) -> None:
        """Draw the same random numbers as PEFT does off meta, in the same order.

        PEFT rounds them to the base's dtype before casting them to float32.
        """
        names: dict[Any, str] = {module: name for name, module in network.named_modules()}
        wrappers = [wrapper for stacks in adapted_experts(network).values() for wrapper in stacks]
        for module in [*(module for module in names if module not in wrappers), *wrappers]:
            for adapter in getattr(module, "lora_A", ()):
                name, base = names[module], layer_or_stack(module)
                dtype = getattr(base, "compute_dtype", None) or getattr(base, "weight", base).dtype
                dtype = dtype if dtype.is_floating_point else torch.float32
                halves = [(half, getattr(module, half)[adapter]) for half in ("lora_A", "lora_B")]
                drawn = [nn.Linear(layer.in_features, layer.out_features, bias=False) for _, layer in halves]
                nn.init.kaiming_uniform_(drawn[0].weight, a=math.sqrt(5))
                nn.init.zeros_(drawn[1].weight)
                for (half, layer), numbers in zip(halves, drawn, strict=True):
                    weight = numbers.weight.detach().to(device, dtype).float()
                    put(layer, "weight", in_memory(f"{name}.{half}.{adapter}.weight", weight))


# ---- peft adapter


class PeftAdapter(AdapterMethod):
    """A method of `METHODS`; PEFT defines the trainable tensors, their names and how they are merged."""

    trained, of_text_parts = (), False

    @property
    def name(self) -> str:
        return self.config.method.upper()

    @classmethod
    def keys_of(cls, peft_type: str) -> Mapping[str, Callable[[Any], bool]] | None:
        if peft_type not in METHODS:
            return None
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

        keys = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[peft_type])} - RESERVED_FIELDS
        return dict.fromkeys(keys, is_plain)

    @property
    def of_norms(self) -> bool:
        return METHODS[self.name].of_norms

    @property
    def _mark(self) -> str:
        """Prefix of the method's tensors in parameter names."""
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        return f".{PEFT_TYPE_TO_TUNER_MAPPING[self.name].prefix}"

    @property
    def moves_in(self) -> Mapping[int, str]:
        """The second step: in the first, tensors that start at zero block gradients of others in the layer."""
        return {2: self._mark}

    def trained_of(self, layers: Iterable[str], names: Iterable[str]) -> set[str]:
        """Return the parameters of the method; refuse layers that PEFT silently skips."""
        parameters = {name for name in names if self._mark in f".{name}"}
        left = set(layers) - {name.partition(self._mark)[0] for name in parameters}
        if left and METHODS[self.name].indivisible != SHARED:
            raise ConfigError(
                f"adapter.method={self.name}: PEFT does not adapt layers such as {min(left)}. Set adapter.targets "
                "to other layers, or set adapter=lora."
            )
        return parameters

    def usual_targets(self, lm: Any) -> Collection[str]:
        return self._in_peft("TARGET", lm)

    def _in_peft(self, role: str, lm: Any) -> Collection[str]:
        """Return PEFT's name suffixes for a model type; empty for types that PEFT does not know."""
        from peft.utils import constants

        table = f"TRANSFORMERS_MODELS_TO_{self.name.replace('_', '')}_{role}_MODULES_MAPPING"
        suffixes: Collection[str] = getattr(constants, table, {}).get(lm.config.model_type) or ()
        return suffixes

    def peft_config(self, lm: Any, layers: list[str], shared: Mapping[str, Any]) -> Any:
        """Return the method's configuration; refuse fields that it does not have."""
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

        kind = PEFT_TYPE_TO_CONFIG_MAPPING[self.name]
        names = {field.name for field in fields(kind)}
        refuse(self._field_problems(names - RESERVED_FIELDS))
        arguments = {key: value for key, value in shared.items() if key in names}
        lacking = [key for key, value in shared.items() if key not in names and value]
        if "ensure_weight_tying" in lacking:
            raise ConfigError(
                f"adapter.train_whole: the embedding is tied to the head, but PEFT trains them separately with "
                f"adapter.method={self.name}. Leave it out, or set adapter=lora."
            )
        if lacking:
            raise ConfigError(f"adapter.method={self.name}: PEFT does not support {lacking[0]} here. Set adapter=lora.")
        if "fan_in_fan_out" in names:
            arguments["fan_in_fan_out"] = any(is_conv1d(lm.get_submodule(layer)) for layer in layers)
        if "feedforward_modules" in names:  # IA3 scales the inputs of a layer that ends a block
            ends = self._in_peft("FEEDFORWARD", lm)
            arguments["feedforward_modules"] = [n for n in arguments["target_modules"] if n.rpartition(".")[2] in ends]
        return kind(**arguments | self.config.fields)

    def _field_problems(self, allowed: Iterable[str]) -> Iterator[str]:
        for name in self.config.fields:
            if name in RESERVED_FIELDS:
                keys = "adapter.targets, adapter.layers and adapter.train_whole"
                yield f"adapter.fields: {name} is set from other settings, such as {keys}. Leave it out."
            elif name not in allowed:
                yield f"adapter.fields: {name} is not a setting of {self.name} in PEFT.{did_you_mean(name, allowed)}"

    def require_divisible(self) -> None:
        cause = METHODS[self.name].indivisible
        if cause:
            raise ConfigError(INDIVISIBLE.format(self.config.method, cause))

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Context that converts PEFT errors to a ConfigError on the method's settings."""
        try:
            yield
        except (ValueError, TypeError, RuntimeError, AssertionError) as fault:
            raise ConfigError(
                f"adapter.method={self.name}: PEFT cannot adapt this model ({gist(fault)}). Change adapter.fields "
                "or adapter.targets, or set adapter=lora."
            ) from fault


def is_norm(module: nn.Module) -> bool:
    """Return whether the module has one weight per vector element, as LayerNorm and RMSNorm do."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 1 and not any(True for _ in module.children())
