"""Conversion of settings of other programs, by tables of their names or by code."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from app.config.adapters import LAYER_NAME
from app.config.conf_files import as_number, choices_by_group
from app.config.kinds import ROW_FORMATS
from app.config.schema import RunConfig
from app.config.validate import field_types, format_value, is_key, setting_of, typed_only

PROGRAMS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("converted_files.yaml").read_text("utf-8")
)
UNSET: tuple[Any, ...] = (None, "", [], {}, False, "none", "None")
ADAPTER_RECIPES = ("lora", "qlora", "full")  # recipes selected by the adapter and quantization of a file


def program_of(settings: Collection[str]) -> str | None:
    """Return the program whose config has these settings, dotted or nested."""
    return next((name for name, facts in PROGRAMS.items() if {*facts["identified_by"]} & {*settings}), None)


@dataclass(kw_only=True, slots=True)
class Conversion:
    """Converted settings (`words`) of a file, and the result for each setting."""

    program: str
    settings: Mapping[str, Any]
    words: dict[str, Any] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)
    not_needed: dict[str, str] = field(default_factory=dict)
    not_converted: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """Table entries for the program."""
        return PROGRAMS[self.program]

    def has(self, *names: str) -> str:
        """Return the first of some settings that is set; empty if none is."""
        return next((name for name in names if self.settings.get(name) not in UNSET), "")

    def convert(self, name: str, **words: Any) -> None:
        """Record the keys and values of a converted setting. Write `__` for a dot in a keyword."""
        overrides = {key.replace("__", "."): value for key, value in words.items()}
        self.words |= overrides
        self.converted[name] = " ".join(f"{key}={format_value(value)}" for key, value in overrides.items())


def record_advice(conversion: Conversion, name: str, value: Any) -> None:
    """Record a setting that is not converted, with the advice in its table row."""
    row = setting_of(conversion.facts["columns"], name, value)
    if value in UNSET or (as_number(value) == 1 and name.endswith(("size", "degree", "dim"))):
        conversion.not_needed[name] = "not set"
    else:
        conversion.not_converted[name] = f"{row['here']}: {row['remark']}"


def by_table(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a setting by the table row of its name or of name=value, else by a key of the same name."""
    facts = conversion.facts
    lookup_name = facts.get("alias", {}).get(name, name)
    not_needed = facts["not_needed"].split()
    row = {} if name in not_needed else setting_of(facts["columns"], lookup_name, value)
    here, remark = row.get("here", ""), row.get("remark", "")
    section = _mapping_of(conversion, lookup_name)
    if not row and any(fnmatch(name, pattern) for pattern in not_needed):
        conversion.not_needed[name] = "no equivalent"
    elif here == "cache_dir":
        conversion.not_needed[name] = f"set {here} on the command line"
    elif typed := [key for key in (lookup_name, f"model.{lookup_name}", here) if typed_only(RunConfig, key)]:
        conversion.not_converted[name] = (
            f"set on the command line only: {typed[0]}={format_value(value)}" if value else "off"
        )
    elif section and not row and lookup_name.partition(".")[2].isidentifier():
        conversion.convert(name, **{f"{section}.{lookup_name.partition('.')[2]}": value})
    elif not row and (value is None or (value is False and lookup_name in choices_by_group())):
        conversion.not_needed[name] = "not set"
    elif is_key(RunConfig, lookup_name) and not row:
        conversion.convert(name, **{lookup_name: value})
    elif not here and (value in UNSET or remark.endswith("Leave it out.")):
        conversion.not_needed[name] = remark or ("off" if value is False else "not set")
    elif not here:
        conversion.not_converted[name] = remark or "no equivalent setting; see docs/keys.md"
    else:
        is_exact = bool(setting_of(facts["columns"], f"{lookup_name}={value}", ""))
        _convert_by_row(conversion, name, value, here, is_exact=is_exact)


def _mapping_of(conversion: Conversion, name: str) -> str:
    """Return the key of the mapping that contains a setting; empty if there is none."""
    key = setting_of(conversion.facts["columns"], name.partition(".")[0], "").get("here", "") if "." in name else ""
    return str(key) if field_types(RunConfig).get(key) == dict[str, Any] else ""


def _convert_by_row(conversion: Conversion, name: str, value: Any, here: str, *, is_exact: bool) -> None:
    """Convert a setting by its table row."""
    words = dict(word.partition("=")[::2] for word in here.split())
    is_switch = any(words.values())
    count = as_number(value) if here.startswith("training.max_") else None
    if words.get("recipe") in ADAPTER_RECIPES:
        del words["recipe"]
    if value is None or (value in UNSET and is_switch and not is_exact) or (count is not None and count < 1):
        conversion.not_needed[name] = "not set"
    elif not words:
        conversion.not_needed[name] = "set by the recipe"
    elif is_switch:
        conversion.convert(
            name, **{key: value if text == "NAME" else yaml.safe_load(text) for key, text in words.items()}
        )
    elif here in choices_by_group() and value not in choices_by_group()[here]:
        conversion.not_converted[name] = (
            f"{here}={format_value(value)} is not supported. Choose one of {', '.join(choices_by_group()[here])}"
        )
    elif isinstance(value, str) and field_types(RunConfig).get(here) == list[str]:
        conversion.convert(name, **{here: [part.strip() for part in value.split(",")]})
    else:
        conversion.convert(name, **{here: value})
    if count is not None and count >= 1:
        conversion.changed.append(
            f"{name}: {format_value(value)}: a run ends after this or training.epochs, whichever comes first"
        )


# ---- special settings


_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # torchtune names
_MLP = ["gate_proj", "up_proj", "down_proj"]
_NAMES_OF_ROWS = {"completion": "text", "pretrain": "text"}  # Axolotl row types that are not chats
_COLUMNS = (
    *("messages", "instruction", "input", "output", "system"),
    *("prompt", "chosen", "rejected", "completion", "label"),
)
_FILE_TYPES = ("json", "csv", "parquet", "text")  # as `path`: the rows are in data_files
_MESSAGE_KEYS = [
    dict(zip(("role", "content"), row_format.message, strict=False))
    for row_format in ROW_FORMATS.values()
    if row_format.message
]
_STAGE = re.compile(r"z(?:ero)?_?(?:stage)?_?([123])")  # in the name of a DeepSpeed config file


def translate(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a setting or record why not; adapter, quantization and rows are derived from the whole file."""
    if name in (conversion.facts["rows"], conversion.facts["adapter"][0], *conversion.facts["four_bits"]):
        return
    special = _SPECIAL.get((conversion.program, name)) or _SPECIAL.get(("", name.rpartition(".")[2]))
    has_advice = name in conversion.facts.get("not_converted", "").split()
    (special or (record_advice if has_advice else by_table))(conversion, name, value)


def _datasets(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a list of datasets of Axolotl or TRL; `type` may be a mapping of columns."""
    sources = value if isinstance(value, list) else []
    if not all(isinstance(entry, Mapping) and "path" in entry for entry in sources) or not sources:
        conversion.not_converted[name] = "entries without path"
        return
    read = [
        _source(conversion, f"{name}[{number}]", source)
        for number, entry in enumerate(sources)
        for source in _split_by_file(entry)
    ]
    if len(read) == 1:
        words = {f"dataset.{key}": text for key, text in read[0].items() if key != "format"}
        conversion.convert(name, dataset=read[0].get("format", "auto"), **words)
    else:
        mix = {f"dataset.mix.source{n}.{key}": text for n, source in enumerate(read, 1) for key, text in source.items()}
        conversion.convert(name, dataset="mix", dataset__format="auto", **mix)


def _split_by_file(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one dataset per file if `path` is a file type."""
    files = entry.get("data_files")
    names = files if isinstance(files, list) else [files]
    if entry["path"] not in _FILE_TYPES or not all(isinstance(file, str) for file in names):
        return [{**entry}]
    return [{**{key: text for key, text in entry.items() if key != "data_files"}, "path": file} for file in names]


def _source(conversion: Conversion, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of one dataset; its other settings are not converted."""
    columns = {"field": "text", **{f"field_{column}": column for column in _COLUMNS}}
    kind = entry.get("type")
    source = {**entry, **(kind if isinstance(kind, Mapping) else {})}
    if conversion.has("rl"):  # the messages are the prompt of both answers
        columns["field_messages"] = "prompt"
        if kind == "chat_template.default":
            source.setdefault("field_messages", "messages")
    keys = {"path": "path", "split": "split", "name": "hub_config", "revision": "revision"}
    keys |= {theirs: f"columns.{ours}" for theirs, ours in columns.items()}
    for key, value in source.items():
        if key not in (*keys, "type", "ds_type") and not _is_default(key, value):
            conversion.not_converted[f"{name}.{key}"] = f"{format_value(value)}: dataset.columns and dataset.format"
    rows = _NAMES_OF_ROWS.get(str(kind))
    read = {keys[key]: value for key, value in source.items() if key in keys and keys[key] != f"columns.{value}"}
    return read | ({"format": rows} if rows else {})


def _is_default(key: str, value: Any) -> bool:
    """Return whether a dataset setting names message keys or roles that are supported by default."""
    if key == "message_property_mappings":
        return value in _MESSAGE_KEYS
    return key == "roles" and isinstance(value, Mapping) and all(names == [role] for role, names in value.items())


def _held_out(conversion: Conversion, name: str, value: Any) -> None:
    """Convert Axolotl's list of eval datasets."""
    if value in UNSET:
        conversion.not_needed[name] = "not set"
        return
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], Mapping) or "path" not in value[0]:
        conversion.not_converted[name] = "dataset.eval_path accepts one file"
        return
    source = _source(conversion, f"{name}[0]", value[0])
    conversion.convert(name, dataset__eval_path=source.pop("path"))
    conversion.not_converted |= {
        f"{name}[0].{key}": "eval rows use the format of the training rows"
        for key, text in source.items()
        if key != "format" and conversion.words.get(f"dataset.{key}") != text
    }


def _dataset(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a dataset path; names in LLaMA-Factory's dataset_info.json are not paths."""
    if value in UNSET:
        conversion.not_needed[name] = "not set"
    elif conversion.program == "llama_factory":
        key = "dataset.eval_path" if name.startswith("eval") else "dataset"
        conversion.not_converted[name] = (
            f"{format_value(value)}: a name in dataset_info.json. Set {key}=FILE, or a hub ID ORG/NAME"
        )
    else:
        conversion.convert(name, dataset="auto", dataset__path=value)


def _targets(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the layers of an adapter, a list or text."""
    names = value.split(",") if isinstance(value, str) else value
    if value in UNSET:
        conversion.not_needed[name] = "not set"
    elif not isinstance(names, list) or not all(isinstance(layer, str | int) for layer in names):
        conversion.not_converted[name] = f"{format_value(value)}: not a list of names"
    elif {"all", "all-linear"} & {*names} or conversion.has("lora_target_linear"):
        conversion.convert(name, adapter__targets=["all-linear"])
    elif not all(LAYER_NAME.fullmatch(str(layer).strip()) for layer in names):
        conversion.not_converted[name] = (
            f"{format_value(value)}: regular expressions are not supported, and all linear layers are the default. "
            "Set layer names or suffixes: adapter.targets=[q_proj,v_proj]"
        )
    else:
        mlp = _MLP if conversion.settings.get("model.apply_lora_to_mlp") else []
        conversion.convert(
            name, adapter__targets=[_LAYERS.get(str(layer).strip(), str(layer).strip()) for layer in names] + mlp
        )


def _per_epoch(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a number of times per epoch."""
    count = as_number(value)
    if count:
        conversion.convert(name, **{_every(name): f"{1 / count:.3g}epoch"})
    elif value in UNSET:
        conversion.not_needed[name] = "not set"
    else:
        conversion.not_converted[name] = f"{format_value(value)}: not a number"


def _strategy(conversion: Conversion, name: str, value: Any) -> None:
    """Convert `epoch`, `no`, or `steps`, whose number is another setting."""
    if value in ("epoch", "no", False):
        conversion.convert(name, **{_every(name): "1epoch" if value == "epoch" else 0})
    elif value in ("steps", None):
        conversion.not_needed[name] = "set by the number of steps"
    else:
        conversion.not_converted[name] = (
            f"{value}: {_every(name)} takes a number of steps, or a fraction of an epoch like 0.5epoch"
        )


def _steps(conversion: Conversion, name: str, value: Any) -> None:
    """Convert steps between evaluations or checkpoints, which only the strategy `steps` uses."""
    kind = name.partition("_")[0]
    strategies = (f"{kind}_strategy", "evaluation_strategy" if kind == "eval" else "")
    other = next((strategy for strategy in strategies if conversion.settings.get(strategy) not in ("steps", None)), "")
    if other:
        conversion.not_needed[name] = f"set by {other}"
    else:
        by_table(conversion, name, value)


def _every(name: str) -> str:
    return "checkpoint.every" if "save" in name else "eval.every"


def _steps_per_epoch(conversion: Conversion, name: str, value: Any) -> None:
    """Convert torchtune's steps per epoch."""
    steps, epochs = as_number(value), as_number(conversion.settings.get("epochs", 1))
    if steps and epochs and math.isfinite(steps * epochs):
        conversion.convert(name, training__max_steps=round(steps * epochs))
    else:
        conversion.not_needed[name] = "not set"


def _warm_up(conversion: Conversion, name: str, value: Any) -> None:
    """Convert warmup steps, or a fraction below 1; if both are set, transformers ignores the ratio."""
    steps = as_number(value)
    ratio = name.replace("steps", "ratio")
    if name == ratio and conversion.has(name.replace("ratio", "steps")):
        conversion.not_needed[name] = f"set by {name.replace('ratio', 'steps')}"
    elif not steps and name != ratio and conversion.settings.get(ratio) is not None:
        conversion.not_needed[name] = f"set by {ratio}"
    elif steps is not None and 0 < steps < 1:
        conversion.convert(name, schedule__warmup_fraction=steps)
    else:
        by_table(conversion, name, value)


def _precision(conversion: Conversion, name: str, value: Any) -> None:
    """Convert `bf16: auto` and similar settings."""
    if value in (True, "auto", "full", "true"):
        conversion.convert(name, precision="auto" if value == "auto" else name.rpartition(".")[2])
    else:
        conversion.not_needed[name] = "off"


def _other_precision(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the dtype of the weights, or of the compute."""
    decided = conversion.has("bf16", "fp16")
    if conversion.program == "trl" and value == "float32" and conversion.settings.get("bf16") is not False:
        decided = "bf16"  # on by default
    if decided:
        conversion.not_needed[name] = f"set by {decided}"
    else:
        by_table(conversion, name, value)


def _bits(conversion: Conversion, name: str, value: Any) -> None:
    """Convert settings of a 4-bit base."""
    if not any(conversion.settings.get(setting) in (True, 4) for setting in conversion.facts["four_bits"]):
        conversion.not_needed[name] = "the base is not quantized"
    elif name.endswith("quant_type"):
        conversion.convert(name, quantization=value)
    else:
        conversion.convert(name, quantization__double_quant=value)


def _deepspeed(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the ZeRO stage in the name of a DeepSpeed config."""
    text = str(value).rpartition("/")[2].lower()
    stage = _STAGE.search(text)
    if value in UNSET:
        conversion.not_needed[name] = "not set"
    elif stage is None:
        conversion.not_converted[name] = (
            f"{format_value(value)}: no ZeRO stage in the name. Set parallel=zero2 or parallel=zero3"
        )
    else:
        offload = {"parallel__offload": True} if "offload" in text else {}
        conversion.convert(name, parallel="zero3" if stage[1] == "3" else "zero2", **offload)


def _attention(conversion: Conversion, name: str, _value: Any) -> None:
    conversion.not_needed[name] = "attention=auto selects the fastest backend for packed documents"


def _template(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a chat template name."""
    if value in (*UNSET, "tokenizer_default", "default"):
        conversion.not_needed[name] = "the tokenizer's own template is used"
    else:
        conversion.not_converted[name] = f"{value}: the tokenizer's own template is used, or model.chat_template=FILE"


def _stage(conversion: Conversion, name: str, value: Any) -> None:
    """Convert LLaMA-Factory's training stage."""
    if value == "sft":
        conversion.not_needed[name] = "default"
    elif value == "dpo" and setting_of(["llama_factory"], "pref_loss", conversion.settings.get("pref_loss")).get(
        "here"
    ):
        conversion.not_needed[name] = "set by pref_loss"
    else:
        by_table(conversion, name, value)


def _loss_of_pairs(conversion: Conversion, name: str, value: Any) -> None:
    """Convert LLaMA-Factory's preference loss."""
    if conversion.settings.get("stage") == "dpo":
        by_table(conversion, name, value)
    else:
        conversion.not_needed[name] = "used with stage: dpo only"


def _one_of_a_list(conversion: Conversion, name: str, value: Any) -> None:
    by_table(conversion, name, value[0] if isinstance(value, list) and len(value) == 1 else value)


def _wandb(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the wandb switch, or the project if wandb is on."""
    if not conversion.settings.get(
        "logging.enable_wandb" if conversion.program == "unsloth" else "use_wandb", conversion.program == "axolotl"
    ):
        conversion.not_needed[name] = "wandb is off"
    elif name.endswith("enable_wandb"):
        conversion.convert(name, tracker="wandb")
    else:
        by_table(conversion, name, value)


def _length(conversion: Conversion, name: str, value: Any) -> None:
    if value is None:
        conversion.not_converted[name] = "unlimited length is not supported. Set dataset.max_length=NUMBER"
    else:
        by_table(conversion, name, value)


def _data_of_code(conversion: Conversion, name: str, value: Any) -> None:
    if "dataset.source" in conversion.settings:
        conversion.not_needed[name] = "dataset=auto detects the format"
        return
    conversion.not_converted[name] = f"{value}: dataset defined by code. Set dataset=FILE, or a hub ID ORG/NAME"


def _component(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a torchtune class by the last part of its name."""
    here = setting_of(["torchtune"], name, value).get("here", "")
    kind = str(value).rpartition(".")[2]
    logger = kind.removesuffix("Logger").lower()
    if here.startswith("optimizer="):
        conversion.convert(name, optimizer=here.partition("=")[2])
    elif "cosine" in kind:
        conversion.convert(name, schedule="cosine")
    elif logger in choices_by_group()["tracker"]:
        conversion.convert(name, tracker=logger)
    elif logger in ("disk", "stdout"):
        conversion.not_needed[name] = "metrics are in metrics.jsonl and on the terminal"
    else:
        conversion.not_converted[name] = f"{value}: not supported"


_SPECIAL = {
    ("axolotl", "datasets"): _datasets,
    ("trl", "datasets"): _datasets,
    ("axolotl", "test_datasets"): _held_out,
    ("llama_factory", "dataset"): _dataset,
    ("llama_factory", "eval_dataset"): _dataset,
    ("trl", "dataset_name"): _dataset,
    ("unsloth", "data.dataset"): _dataset,
    ("axolotl", "chat_template"): _template,
    ("llama_factory", "template"): _template,
    ("llama_factory", "stage"): _stage,
    ("llama_factory", "pref_loss"): _loss_of_pairs,
    ("torchtune", "dataset._component_"): _data_of_code,
    ("torchtune", "dataset.source"): _dataset,
    **{("torchtune", f"{name}._component_"): _component for name in ("optimizer", "lr_scheduler", "metric_logger")},
    ("torchtune", "model.lora_attn_modules"): _targets,
    ("torchtune", "max_steps_per_epoch"): _steps_per_epoch,
    **{("", name): _targets for name in ("lora_target", "lora_target_modules", "target_modules")},
    **{("", name): _per_epoch for name in ("evals_per_epoch", "saves_per_epoch")},
    **{("", name): _strategy for name in ("eval_strategy", "evaluation_strategy", "save_strategy")},
    **{("", name): _steps for name in ("eval_steps", "save_steps")},
    **{("", name): _warm_up for name in ("warmup_steps", "warmup_ratio")},
    **{("", name): _precision for name in ("bf16", "fp16")},
    **{("", name): _other_precision for name in ("tf32", "torch_dtype", "bnb_4bit_compute_dtype")},
    ("trl", "dtype"): _other_precision,
    ("trl", "max_length"): _length,
    ("axolotl", "wandb_project"): _wandb,
    ("unsloth", "logging.wandb_project"): _wandb,
    ("unsloth", "logging.enable_wandb"): _wandb,
    **{("", name): _bits for name in ("bnb_4bit_quant_type", "use_bnb_nested_quant", "double_quantization")},
    ("", "deepspeed"): _deepspeed,
    **{("", name): _one_of_a_list for name in ("report_to", "loss_type", "dpo_loss_type")},
    **{("", name): _attention for name in ("flash_attention", "flash_attn", "attn_implementation", "sdp_attention")},
}
