"""Settings of other programs: translated by tables of their names, or by code where no table row can."""

import math
import re
from collections.abc import Mapping
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
OF_ADAPTERS = ("lora", "qlora", "full")  # recipes that follow from the adapter and the bits of the whole file


@dataclass(kw_only=True, slots=True)
class Conversion:
    """The settings of a file: `words` of this program, and what became of each setting."""

    program: str
    settings: Mapping[str, Any]
    words: dict[str, Any] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)
    needless: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """What is known of files of the program."""
        return PROGRAMS[self.program]

    def has(self, *names: str) -> str:
        """The first of some settings that is set; empty for none."""
        return next((name for name in names if self.settings.get(name) not in UNSET), "")

    def carry(self, name: str, **words: Any) -> None:
        """Set words of this program for a setting; a dot in a key is written as two underscores."""
        given = {key.replace("__", "."): value for key, value in words.items()}
        self.words |= given
        self.carried[name] = " ".join(f"{key}={format_value(value)}" for key, value in given.items())


def lost(found: Conversion, name: str, value: Any) -> None:
    """A setting with advice in its row of the table, and without a translation."""
    row = setting_of(found.facts["columns"], name, value)
    if value in UNSET or (as_number(value) == 1 and name.endswith(("size", "degree", "dim"))):
        found.needless[name] = "it is not set"
    else:
        found.lost[name] = f"{row['here']}: {row['remark']}"


def by_table(found: Conversion, name: str, value: Any) -> None:
    """A setting by the row of its name, or of its name and value; by its name alone where it has one here."""
    facts = found.facts
    known = facts.get("alias", {}).get(name, name)
    needless = facts["needless"].split()
    row = {} if name in needless else setting_of(facts["columns"], known, value)
    here, remark = row.get("here", ""), row.get("remark", "")
    section = _mapping_of(found, known)
    if not row and any(fnmatch(name, pattern) for pattern in needless):
        found.needless[name] = "nothing here corresponds to it"
    elif here == "cache_dir":
        found.needless[name] = f"{here} has it, which is typed"
    elif typed := [key for key in (known, f"model.{known}", here) if typed_only(RunConfig, key)]:
        found.lost[name] = f"it must be typed: {typed[0]}={format_value(value)}" if value else "it is off"
    elif section and not row and known.partition(".")[2].isidentifier():
        found.carry(name, **{f"{section}.{known.partition('.')[2]}": value})
    elif not row and (value is None or (value is False and known in choices_by_group())):
        found.needless[name] = "it is not set"
    elif is_key(RunConfig, known) and not row:
        found.carry(name, **{known: value})
    elif not here and (value in UNSET or remark.endswith("Leave it out.")):
        found.needless[name] = remark or ("it is off" if value is False else "it is not set")
    elif not here:
        found.lost[name] = remark or "no setting of this program is known for it: docs/keys.md has all"
    else:
        is_exact = bool(setting_of(facts["columns"], f"{known}={value}", ""))
        _carry_here(found, name, value, here, is_exact=is_exact)


def _mapping_of(found: Conversion, name: str) -> str:
    """The key here of a setting that is a mapping, for one of its entries."""
    key = setting_of(found.facts["columns"], name.partition(".")[0], "").get("here", "") if "." in name else ""
    return str(key) if field_types(RunConfig).get(key) == dict[str, Any] else ""


def _carry_here(found: Conversion, name: str, value: Any, here: str, *, is_exact: bool) -> None:
    """Carry a setting by the words of its row in the table."""
    words = dict(word.partition("=")[::2] for word in here.split())
    is_switch = any(words.values())
    count = as_number(value) if here.startswith("training.max_") else None
    if words.get("recipe") in OF_ADAPTERS:
        del words["recipe"]
    if value is None or (value in UNSET and is_switch and not is_exact) or (count is not None and count < 1):
        found.needless[name] = "it is not set"
    elif not words:
        found.needless[name] = "the recipe has it"
    elif is_switch:
        found.carry(name, **{key: value if text == "NAME" else yaml.safe_load(text) for key, text in words.items()})
    elif here in choices_by_group() and value not in choices_by_group()[here]:
        found.lost[name] = f"{here}={format_value(value)} is not offered: {', '.join(choices_by_group()[here])} are"
    elif isinstance(value, str) and field_types(RunConfig).get(here) == list[str]:
        found.carry(name, **{here: [each.strip() for each in value.split(",")]})
    else:
        found.carry(name, **{here: value})
    if count is not None and count >= 1:
        found.changed.append(
            f"{name}: {format_value(value)}: a run also ends after training.epochs, whichever is first"
        )


# ---- special settings


_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # of torchtune
_MLP = ["gate_proj", "up_proj", "down_proj"]
_NAMES_OF_ROWS = {"completion": "text", "pretrain": "text"}  # type of Axolotl's rows that is no chat
_COLUMNS = (
    *("messages", "instruction", "input", "output", "system"),
    *("prompt", "chosen", "rejected", "completion", "label"),
)
_FILE_TYPES = ("json", "csv", "parquet", "text")  # as a path: its data_files are the rows
_MESSAGE_KEYS = [
    dict(zip(("role", "content"), each.message, strict=False)) for each in ROW_FORMATS.values() if each.message
]
_STAGE = re.compile(r"z(?:ero)?_?(?:stage)?_?([123])")  # of DeepSpeed, in the name of its file


def translate(found: Conversion, name: str, value: Any) -> None:
    """Carry a setting, or say why not; what the adapter, its bits and the rows are is read of the whole file."""
    if name in (found.facts["rows"], found.facts["adapter"][0], *found.facts["four_bits"]):
        return
    special = _SPECIAL.get((found.program, name)) or _SPECIAL.get(("", name.rpartition(".")[2]))
    is_lost = name in found.facts.get("lost", "").split()
    (special or (lost if is_lost else by_table))(found, name, value)


def _datasets(found: Conversion, name: str, value: Any) -> None:
    """A list of data sets of Axolotl or TRL; `type` may be a mapping of columns."""
    sources = value if isinstance(value, list) else []
    if not all(isinstance(each, Mapping) and "path" in each for each in sources) or not sources:
        found.lost[name] = "its entries have no path"
        return
    read = [
        _source(found, f"{name}[{number}]", one) for number, each in enumerate(sources) for one in _of_one_file(each)
    ]
    if len(read) == 1:
        words = {f"dataset.{key}": text for key, text in read[0].items() if key != "format"}
        found.carry(name, dataset=read[0].get("format", "auto"), **words)
    else:
        mix = {f"dataset.mix.source{n}.{key}": text for n, each in enumerate(read, 1) for key, text in each.items()}
        found.carry(name, dataset="mix", dataset__format="auto", **mix)


def _of_one_file(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A data set for each of its files, where its path is their type."""
    files = given.get("data_files")
    names = files if isinstance(files, list) else [files]
    if given["path"] not in _FILE_TYPES or not all(isinstance(each, str) for each in names):
        return [{**given}]
    return [{**{key: text for key, text in given.items() if key != "data_files"}, "path": each} for each in names]


def _source(found: Conversion, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of one data set; what it has besides is lost."""
    columns = {"field": "text", **{f"field_{each}": each for each in _COLUMNS}}
    kind = given.get("type")
    source = {**given, **(kind if isinstance(kind, Mapping) else {})}
    if found.has("rl"):  # the messages are what both answers follow
        columns["field_messages"] = "prompt"
        if kind == "chat_template.default":
            source.setdefault("field_messages", "messages")
    keys = {"path": "path", "split": "split", "name": "hub_config", "revision": "revision"}
    keys |= {theirs: f"columns.{ours}" for theirs, ours in columns.items()}
    for key, value in source.items():
        if key not in (*keys, "type", "ds_type") and not _is_default(key, value):
            found.lost[f"{name}.{key}"] = f"{format_value(value)}: dataset.columns and dataset.format"
    rows = _NAMES_OF_ROWS.get(str(kind))
    read = {keys[key]: value for key, value in source.items() if key in keys and keys[key] != f"columns.{value}"}
    return read | ({"format": rows} if rows else {})


def _is_default(key: str, value: Any) -> bool:
    """Whether a setting of a data set names keys of messages, or roles, that are read without it."""
    if key == "message_property_mappings":
        return value in _MESSAGE_KEYS
    return key == "roles" and isinstance(value, Mapping) and all(names == [role] for role, names in value.items())


def _held_out(found: Conversion, name: str, value: Any) -> None:
    """Axolotl's list of held-out data sets."""
    if value in UNSET:
        found.needless[name] = "it is not set"
        return
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], Mapping) or "path" not in value[0]:
        found.lost[name] = "dataset.eval_path takes one file"
        return
    source = _source(found, f"{name}[0]", value[0])
    found.carry(name, dataset__eval_path=source.pop("path"))
    found.lost |= {
        f"{name}[0].{key}": "held-out rows are read as the others"
        for key, text in source.items()
        if key != "format" and found.words.get(f"dataset.{key}") != text
    }


def _dataset(found: Conversion, name: str, value: Any) -> None:
    """The path of a data set: a name of LLaMA-Factory's dataset_info.json is none."""
    if value in UNSET:
        found.needless[name] = "it is not set"
    elif found.program == "llama_factory":
        key = "dataset.eval_path" if name.startswith("eval") else "dataset"
        found.lost[name] = (
            f"{format_value(value)}: a name of dataset_info.json. Type {key}=FILE, or ORG/NAME of the hub"
        )
    else:
        found.carry(name, dataset="auto", dataset__path=value)


def _targets(found: Conversion, name: str, value: Any) -> None:
    """Layers of an adapter, as a list or a text."""
    names = value.split(",") if isinstance(value, str) else value
    if value in UNSET:
        found.needless[name] = "it is not set"
    elif not isinstance(names, list) or not all(isinstance(each, str | int) for each in names):
        found.lost[name] = f"{format_value(value)}: it is no list of names"
    elif {"all", "all-linear"} & {*names} or found.has("lora_target_linear"):
        found.carry(name, adapter__targets=["all-linear"])
    elif not all(LAYER_NAME.fullmatch(str(each).strip()) for each in names):
        found.lost[name] = (
            f"{format_value(value)}: regular expressions are not supported, and all linear layers are the default. "
            "Type layer names or their ends: adapter.targets=[q_proj,v_proj]"
        )
    else:
        mlp = _MLP if found.settings.get("model.apply_lora_to_mlp") else []
        found.carry(name, adapter__targets=[_LAYERS.get(str(each).strip(), str(each).strip()) for each in names] + mlp)


def _per_epoch(found: Conversion, name: str, value: Any) -> None:
    """A number of times an epoch."""
    count = as_number(value)
    if count:
        found.carry(name, **{_every(name): f"{1 / count:.3g}epoch"})
    elif value in UNSET:
        found.needless[name] = "it is not set"
    else:
        found.lost[name] = f"{format_value(value)}: it is no number"


def _strategy(found: Conversion, name: str, value: Any) -> None:
    """`epoch`, `no`, or `steps`: their number is another setting."""
    if value in ("epoch", "no", False):
        found.carry(name, **{_every(name): "1epoch" if value == "epoch" else 0})
    elif value in ("steps", None):
        found.needless[name] = "the number of steps says it"
    else:
        found.lost[name] = f"{value}: {_every(name)} takes a number of steps, or a part of an epoch like 0.5epoch"


def _steps(found: Conversion, name: str, value: Any) -> None:
    """Steps between evaluations or checkpoints, which only the strategy `steps` reads."""
    kind = name.partition("_")[0]
    strategies = (f"{kind}_strategy", "evaluation_strategy" if kind == "eval" else "")
    other = next((each for each in strategies if found.settings.get(each) not in ("steps", None)), "")
    if other:
        found.needless[name] = f"{other} says it"
    else:
        by_table(found, name, value)


def _every(name: str) -> str:
    return "checkpoint.every" if "save" in name else "eval.every"


def _steps_per_epoch(found: Conversion, name: str, value: Any) -> None:
    """Steps of each epoch, of torchtune."""
    steps, epochs = as_number(value), as_number(found.settings.get("epochs", 1))
    if steps and epochs and math.isfinite(steps * epochs):
        found.carry(name, training__max_steps=round(steps * epochs))
    else:
        found.needless[name] = "it is not set"


def _warm_up(found: Conversion, name: str, value: Any) -> None:
    """Steps of warm-up, a fraction below 1; where they are given too, transformers does not read the ratio."""
    steps = as_number(value)
    ratio = name.replace("steps", "ratio")
    if name == ratio and found.has(name.replace("ratio", "steps")):
        found.needless[name] = f"{name.replace('ratio', 'steps')} says it"
    elif not steps and name != ratio and found.settings.get(ratio) is not None:
        found.needless[name] = f"{ratio} says it"
    elif steps is not None and 0 < steps < 1:
        found.carry(name, schedule__warmup_fraction=steps)
    else:
        by_table(found, name, value)


def _precision(found: Conversion, name: str, value: Any) -> None:
    """`bf16: auto` and the like."""
    if value in (True, "auto", "full", "true"):
        found.carry(name, precision="auto" if value == "auto" else name.rpartition(".")[2])
    else:
        found.needless[name] = "it is off"


def _other_precision(found: Conversion, name: str, value: Any) -> None:
    """The type of weights that are computed in another one, or of the rest of the arithmetic."""
    decided = found.has("bf16", "fp16")
    if found.program == "trl" and value == "float32" and found.settings.get("bf16") is not False:
        decided = "bf16"  # which is on by itself
    if decided:
        found.needless[name] = f"{decided} decides"
    else:
        by_table(found, name, value)


def _bits(found: Conversion, name: str, value: Any) -> None:
    """Details of a base in four bits."""
    if not any(found.settings.get(each) in (True, 4) for each in found.facts["four_bits"]):
        found.needless[name] = "the base is not quantized"
    elif name.endswith("quant_type"):
        found.carry(name, quantization=value)
    else:
        found.carry(name, quantization__double_quant=value)


def _deepspeed(found: Conversion, name: str, value: Any) -> None:
    """The stage of ZeRO in the name of DeepSpeed's file."""
    text = str(value).rpartition("/")[2].lower()
    stage = _STAGE.search(text)
    if value in UNSET:
        found.needless[name] = "it is not set"
    elif stage is None:
        found.lost[name] = f"{format_value(value)}: its name has no stage. Type parallel=zero2 or parallel=zero3"
    else:
        offload = {"parallel__offload": True} if "offload" in text else {}
        found.carry(name, parallel="zero3" if stage[1] == "3" else "zero2", **offload)


def _attention(found: Conversion, name: str, _value: Any) -> None:
    found.needless[name] = "attention=auto takes the fastest kernel that keeps packed documents apart"


def _template(found: Conversion, name: str, value: Any) -> None:
    """A chat template by its name there."""
    if value in (*UNSET, "tokenizer_default", "default"):
        found.needless[name] = "the tokenizer's own template is used"
    else:
        found.lost[name] = f"{value}: the tokenizer's own template is used, or model.chat_template=FILE"


def _stage(found: Conversion, name: str, value: Any) -> None:
    """LLaMA-Factory's word for a task."""
    if value == "sft":
        found.needless[name] = "it is the default"
    elif value == "dpo" and setting_of(["llama_factory"], "pref_loss", found.settings.get("pref_loss")).get("here"):
        found.needless[name] = "pref_loss says it"
    else:
        by_table(found, name, value)


def _loss_of_pairs(found: Conversion, name: str, value: Any) -> None:
    """LLaMA-Factory's loss over pairs of answers."""
    if found.settings.get("stage") == "dpo":
        by_table(found, name, value)
    else:
        found.needless[name] = "used with stage: dpo only"


def _one_of_a_list(found: Conversion, name: str, value: Any) -> None:
    by_table(found, name, value[0] if isinstance(value, list) and len(value) == 1 else value)


def _wandb(found: Conversion, name: str, value: Any) -> None:
    """A switch of wandb, or its project, which is read where the switch is on."""
    if not found.settings.get(
        "logging.enable_wandb" if found.program == "unsloth" else "use_wandb", found.program == "axolotl"
    ):
        found.needless[name] = "wandb is off"
    elif name.endswith("enable_wandb"):
        found.carry(name, tracker="wandb")
    else:
        by_table(found, name, value)


def _length(found: Conversion, name: str, value: Any) -> None:
    if value is None:
        found.lost[name] = "rows without a limit are not offered: dataset.max_length=NUMBER"
    else:
        by_table(found, name, value)


def _data_of_code(found: Conversion, name: str, value: Any) -> None:
    if "dataset.source" in found.settings:
        found.needless[name] = "dataset=auto finds the format"
        return
    found.lost[name] = f"{value}: rows that code chooses. Type dataset=FILE, or ORG/NAME of the hub"


def _component(found: Conversion, name: str, value: Any) -> None:
    """A class of torchtune, by its last name."""
    here = setting_of(["torchtune"], name, value).get("here", "")
    kind = str(value).rpartition(".")[2]
    logger = kind.removesuffix("Logger").lower()
    if here.startswith("optimizer="):
        found.carry(name, optimizer=here.partition("=")[2])
    elif "cosine" in kind:
        found.carry(name, schedule="cosine")
    elif logger in choices_by_group()["tracker"]:
        found.carry(name, tracker=logger)
    elif logger in ("disk", "stdout"):
        found.needless[name] = "metrics.jsonl and the terminal have the metrics"
    else:
        found.lost[name] = f"{value}: it is not offered"


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
    **{("torchtune", f"{each}._component_"): _component for each in ("optimizer", "lr_scheduler", "metric_logger")},
    ("torchtune", "model.lora_attn_modules"): _targets,
    ("torchtune", "max_steps_per_epoch"): _steps_per_epoch,
    **{("", each): _targets for each in ("lora_target", "lora_target_modules", "target_modules")},
    **{("", each): _per_epoch for each in ("evals_per_epoch", "saves_per_epoch")},
    **{("", each): _strategy for each in ("eval_strategy", "evaluation_strategy", "save_strategy")},
    **{("", each): _steps for each in ("eval_steps", "save_steps")},
    **{("", each): _warm_up for each in ("warmup_steps", "warmup_ratio")},
    **{("", each): _precision for each in ("bf16", "fp16")},
    **{("", each): _other_precision for each in ("tf32", "torch_dtype", "bnb_4bit_compute_dtype")},
    ("trl", "dtype"): _other_precision,
    ("trl", "max_length"): _length,
    ("axolotl", "wandb_project"): _wandb,
    ("unsloth", "logging.wandb_project"): _wandb,
    ("unsloth", "logging.enable_wandb"): _wandb,
    **{("", each): _bits for each in ("bnb_4bit_quant_type", "use_bnb_nested_quant", "double_quantization")},
    ("", "deepspeed"): _deepspeed,
    **{("", each): _one_of_a_list for each in ("report_to", "loss_type", "dpo_loss_type")},
    **{("", each): _attention for each in ("flash_attention", "flash_attn", "attn_implementation", "sdp_attention")},
}
