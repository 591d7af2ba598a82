"""Kinds of adapter, as facts and rules that messages, pages and memory suggestions share."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from app.config.did_you_mean import did_you_mean
from app.config.peft_methods import METHODS, REFUSED
from app.config.schema import AdapterConfig, RunConfig
from app.config.validate import format_value

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # before the names of the base
LAYER_NAME = re.compile(r"[\w.-]+")  # a name or its end, which is no endless regular expression
_PLAIN_INITS = ("default", "gaussian", "eva", "loftq")  # which leave weights of the base as they are
_INITS = re.compile(r"default|gaussian|orthogonal|pissa|pissa_niter_[1-9]\d?|olora|eva|corda|loftq")
_NAMES = "default, gaussian, orthogonal, pissa, pissa_niter_N, olora, eva, corda, loftq"
_OTHER_INITS = {"lora_ga": "takes gradients before the first step, which is not offered", "mica": "trains A alone"}

# settings of PEFT's methods that have keys here, or that would train or load something beside the method
RESERVED_FIELDS = frozenset(
    {"task_type", "peft_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"}
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"}
    | {"fan_in_fan_out"}
)

# by which PEFT chooses among the layers that target_modules matches
MATCHING_FIELDS = ("exclude_modules", "layers_to_transform", "layers_pattern")

INDIVISIBLE = "adapter.method={} {}, which FSDP cannot divide. Set parallel=ddp, or adapter=lora."


class AdapterKind(NamedTuple):
    """One kind; how it changes a model is `model.adapters`."""

    name: str  # in papers
    problems: Callable[[RunConfig], Iterator[str]]  # of its keys
    has_rank: bool  # whether it is matrices of rank adapter.r
    # the setting with which torch.compile cannot trace its layers, or nothing
    untraceable: Callable[[AdapterConfig], str] = lambda _adapter: ""


def changes_base(adapter: AdapterConfig) -> bool:
    """Whether the base gives up what the adapter begins with; the adapter is saved as one of the ordinary base."""
    return adapter.init.startswith(("pissa", "olora", "corda"))


def _low_rank(run: RunConfig) -> Iterator[str]:
    adapter = run.adapter
    if adapter.r < 1:
        yield f"adapter.r={adapter.r} must be at least 1 for adapter.kind={adapter.kind}."
    if adapter.alpha <= 0:
        yield f"adapter.alpha={adapter.alpha:g} must be above 0 for adapter.kind={adapter.kind}."
    if adapter.experts and adapter.dropout:
        yield (
            f"adapter.dropout={adapter.dropout:g} with adapter.experts=true: PEFT has no dropout for experts. "
            "Set adapter.dropout=0, or adapter.experts=false."
        )
    for key, plain in (("dora", False), ("init", "default")) if adapter.experts else ():
        if getattr(adapter, key) != plain:
            yield (
                f"adapter.{key}={str(getattr(adapter, key)).lower()} with adapter.experts=true: stacks of experts have "
                f"plain LoRA alone. Set adapter.{key}={str(plain).lower()}, or adapter.experts=false."
            )
    if not adapter.targets:
        yield "adapter.targets is empty. Set adapter.targets=[all-linear] or names of layers."
    yield from _pattern_problems(adapter)
    yield from _init_problems(run)


def _pattern_problems(adapter: AdapterConfig) -> Iterator[str]:
    for key, kinds in (("rank_pattern", int), ("alpha_pattern", int | float)):
        pattern: dict[str, object] = getattr(adapter, key)
        for name, value in pattern.items():
            if isinstance(value, bool) or not isinstance(value, kinds) or value <= 0:
                words = "a rank is a whole number from 1 on" if key == "rank_pattern" else "alpha is a number above 0"
                yield f"adapter.{key}={{{name}: {value}}}: {words}. Give one for each name."
            if not LAYER_NAME.fullmatch(name):
                yield f"adapter.{key}: {name} is no name of layers. Give names or their ends, such as 3.mlp.down_proj."


def _init_problems(run: RunConfig) -> Iterator[str]:
    adapter, init = run.adapter, f"adapter.init={run.adapter.init}"
    if not _INITS.fullmatch(adapter.init):
        cause = _OTHER_INITS.get(adapter.init, f"is none of {_NAMES}")
        yield f"{init} {cause}. Choose {'default' if adapter.init in _OTHER_INITS else 'one of these'}."
    elif adapter.init not in _PLAIN_INITS and run.quantization.kind != "none":
        yield (
            f"{init} reads weights of the base, which quantization.kind={run.quantization.kind} has packed. Set "
            "adapter.init=eva or default, or recipe=lora quantization=none."
        )
    elif adapter.init == "loftq" and run.quantization.kind not in {"nf4", "fp4"}:
        yield (
            f"{init} corrects a base in 4 bits, and quantization.kind={run.quantization.kind} has none. Set "
            "quantization=nf4, or adapter.init=eva."
        )
    if adapter.dora and (changes_base(adapter) or adapter.init == "loftq"):
        cause = "the lengths would be those of a base without what the adapter begins with"
        if changes_base(adapter):
            cause = "the result could not be saved as an adapter of the ordinary base"
        yield f"{init} with adapter.dora=true: {cause}. Choose one of them."
    if adapter.init != "default" and adapter.start is not None:
        yield f"{init}: adapter.start={adapter.start} gives the numbers that the adapter begins with. Leave one out."
    if adapter.dora and run.quantization.kind not in {"none", "nf4", "fp4"}:
        yield (
            f"adapter.dora=true reads the weights of the base, and PEFT cannot unpack quantization.kind="
            f"{run.quantization.kind}. Set quantization=nf4 or none, or adapter.dora=false."
        )


def is_plain(value: Any) -> bool:
    """Whether it is a number, a name, or several: no path, and no endless regular expression."""
    if isinstance(value, dict):
        return all(is_plain(name) and is_plain(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, str):
        return LAYER_NAME.fullmatch(value) is not None
    return value is None or (isinstance(value, bool | int | float) and math.isfinite(value))


def _of_peft(run: RunConfig) -> Iterator[str]:
    adapter, name = run.adapter, run.adapter.method.upper()
    given, bits = f"adapter.method={adapter.method}", run.quantization.kind
    if name in REFUSED:
        yield f"{given} {REFUSED[name]}."
    elif name not in METHODS:
        yield f"{given} is no method of PEFT that is offered.{did_you_mean(name, METHODS)}"
    elif bits != "none" and not (METHODS[name].quantized and bits in {"nf4", "fp4"}):
        wanted = "quantization=nf4" if METHODS[name].quantized else "adapter=lora"
        yield f"{given} cannot read a base packed by quantization.kind={bits}. Set quantization=none, or {wanted}."
    elif run.parallel.divides and METHODS[name].indivisible:
        yield INDIVISIBLE.format(adapter.method, METHODS[name].indivisible)
    for key, value in adapter.fields.items():
        if not is_plain(value):
            yield (
                f"adapter.fields={{{key}: {format_value(value)}}}: a setting is a number, true, false, a name, or a "
                "list or mapping of these. Give one of them."
            )
        elif "dropout" in key and value and run.preference.has_reference:
            yield (
                f"adapter.fields={{{key}: {format_value(value)}}} with preference={run.preference.kind}: the reference "
                "is without it, so rewards would be noise from the first step on. Leave it out."
            )


def _untraceable_method(adapter: AdapterConfig) -> str:
    return "" if METHODS[adapter.method.upper()].compiles else f"adapter.method={adapter.method}"


ADAPTER_KINDS = {
    "none": AdapterKind("full fine-tuning", lambda _adapter: iter(()), has_rank=False),
    "lora": AdapterKind(
        "LoRA", _low_rank, has_rank=True, untraceable=lambda adapter: "adapter.dora=true" * adapter.dora
    ),
    "peft": AdapterKind("PEFT", _of_peft, has_rank=False, untraceable=_untraceable_method),
}


def compile_obstacle(adapter: AdapterConfig) -> str | None:
    """Return why layers with this adapter are not compiled, None where they can be."""
    setting = ADAPTER_KINDS[adapter.kind].untraceable(adapter)
    return f"{setting}: torch.compile cannot trace PEFT's layers" if setting else None


def name_of(adapter: Mapping[str, Any]) -> str:
    """The name in papers of the adapter of a run's settings, which an older one wrote in part."""
    kind = str(adapter.get("kind", "none"))
    return str(adapter.get("method")).upper() if kind == "peft" else ADAPTER_KINDS.get(kind, ADAPTER_KINDS["lora"]).name
