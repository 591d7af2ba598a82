"""Conversion of settings of other programs whose meaning depends on their value or on other settings of the file."""

import math
import re
from typing import Any

from app.config.adapters import LAYER_NAME
from app.config.conf_files import as_number, choices_by_group
from app.config.converted_settings import UNSET, Conversion, by_table, record_advice
from app.config.other_datasets import (
    dataset_file,
    datasets,
    has_alpaca_prompts,
    held_out,
    named_datasets,
    paths,
    swift_datasets,
)
from app.config.published_models import why_no_code, why_own_template, why_own_token
from app.config.validate import format_value, setting_of

_LAYERS = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # torchtune names
_MLP = ["gate_proj", "up_proj", "down_proj"]
_STAGE = re.compile(r"z(?:ero)?_?(?:stage)?_?([0123])")  # in the name of a DeepSpeed config file
_MAX_PATTERN_CHARACTERS = 300
# a regular expression of layer names that ends with alternatives, such as (q|k|v)_proj
_LAYER_PATTERN = re.compile(
    r"\^?[\w.\\]*layers\\?\.(?:\[\\d\]|\\d)\+\\?\.(?:\(_checkpoint_wrapped_module\\?\.\)\?)?(?:\(?[\w|]+\)?\\?\.)*"
    r"\((?P<names>[\w|]+)\)(?P<end>\w*)\$?"
)


def translate(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a setting or record why not; adapter, quantization and rows are derived from the whole file."""
    facts = conversion.facts
    if name in (facts["rows"], *facts["adapter"][0].split("|"), *facts["four_bits"]):
        return
    special = _SPECIAL.get((conversion.program, name)) or _SPECIAL.get(("", name.rpartition(".")[2]))
    if name.startswith("fsdp_config."):
        special = _fsdp
    has_advice = name in facts.get("not_converted", "").split()
    (special or (record_advice if has_advice else by_table))(conversion, name, value)


def _targets(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the layers of an adapter, a list or text."""
    names = value.split(",") if isinstance(value, str) else value
    if value in UNSET:
        conversion.not_needed[name] = "not set"
    elif not isinstance(names, list) or not all(isinstance(layer, str | int) for layer in names):
        conversion.not_converted[name] = f"{format_value(value)}: not a list of names"
    elif {"all", "all-linear"} & {*names} or conversion.has("lora_target_linear"):
        conversion.convert(name, adapter__targets=["all-linear"])
    elif isinstance(value, str) and (suffixes := _suffixes_of(value)):
        conversion.convert(name, adapter__targets=suffixes)
        conversion.changed.append(
            f"{name}: the pattern becomes the suffixes it ends with, in all layers of the text part"
        )
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


def _suffixes_of(pattern: str) -> list[str]:
    """Return the layer name suffixes of a regular expression that ends with alternatives; empty for others."""
    match = _LAYER_PATTERN.fullmatch(pattern) if len(pattern) <= _MAX_PATTERN_CHARACTERS else None
    return [f"{name}{match['end']}" for name in match["names"].split("|")] if match else []


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
        conversion.convert(name, parallel={"0": "ddp", "3": "zero3"}.get(stage[1], "zero2"), **offload)


def _attention(conversion: Conversion, name: str, _value: Any) -> None:
    conversion.not_needed[name] = "attention=auto selects the fastest backend for packed documents"


def _template(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a chat template name: the model's own one, a built-in one, or not."""
    builtin = conversion.facts["templates"].get(value, "") if isinstance(value, str) else ""
    if value in (*UNSET, "tokenizer_default", "default"):
        conversion.not_needed[name] = "the tokenizer's own template is used"
    elif has_alpaca_prompts(conversion):
        conversion.not_needed[name] = "type: alpaca writes prompts without a chat template"
    elif reason := why_own_template(conversion.model, str(value), builtin):
        conversion.not_needed[name] = reason
    elif builtin:
        conversion.convert(name, model__chat_template=builtin)
    else:
        conversion.not_converted[name] = f"{value}: the tokenizer's own template is used, or model.chat_template=FILE"
    if conversion.program == "llama_factory" and builtin == "qwen3":
        conversion.changed.append(
            f"{name}: {value}: answers before the last one have no empty <think> block, as when the model generates"
        )


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


def _remote_code(conversion: Conversion, name: str, value: Any) -> None:
    """Record that code of the model repository is not run, with the reason if the model needs none."""
    reason = why_no_code(conversion.model) if value else ""
    if reason:
        conversion.not_needed[name] = reason
    else:
        by_table(conversion, name, value)


def _special_token(conversion: Conversion, name: str, value: Any) -> None:
    """Record a special token that the tokenizer has already."""
    reason = why_own_token(conversion.model, name.rpartition(".")[2], value)
    if reason:
        conversion.not_needed[name] = reason
    else:
        by_table(conversion, name, value)


_FSDP_STRATEGIES = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "HYBRID_SHARD": "hsdp", "NO_SHARD": "ddp"}


def _fsdp(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a setting of FSDP 1 or 2; those of its wrapping and files are not needed."""
    setting = name.rpartition(".")[2].removeprefix("fsdp_")
    key = {"offload_params": "parallel.offload", "reshard_after_forward": "parallel.reshard"}.get(setting)
    if setting == "sharding_strategy" and value in _FSDP_STRATEGIES:
        conversion.convert(name, parallel=_FSDP_STRATEGIES[value])
    elif key and isinstance(value, bool):
        conversion.words.setdefault("parallel", "fsdp")
        conversion.convert(name, **{key: value})
    elif setting == "activation_checkpointing" and value is True:
        conversion.convert(name, training__recompute=True)
    else:
        by_table(conversion, name, value)


def _plugins(conversion: Conversion, name: str, value: Any) -> None:
    """Convert Axolotl's plugins, of which those with kernels compute the same functions."""
    plugins = [str(plugin) for plugin in (value if isinstance(value, list) else [value])]
    others = [
        plugin for plugin in plugins if not any(kind in plugin for kind in ("cut_cross_entropy", "liger", "kernels"))
    ]
    if value in UNSET or not others:
        conversion.not_needed[name] = "not set" if value in UNSET else "other kernels of the same functions"
    else:
        conversion.not_converted[name] = f"{', '.join(others)}: no equivalent"


def _trained_parts(conversion: Conversion, name: str, value: Any) -> None:
    """Convert patterns of the weights to train; the text part is trained as a whole, and no other part is loaded."""
    patterns = [str(pattern).lstrip("^").replace("\\", "") for pattern in value] if isinstance(value, list) else []
    is_text_part = all(pattern.startswith(("model.language_model.", "lm_head")) for pattern in patterns)
    parts = {pattern.partition(".")[0] for pattern in patterns}
    if parts == {"model", "lm_head"} and is_text_part and not conversion.has(conversion.facts["adapter"][0]):
        conversion.not_needed[name] = "the text part is trained as a whole, and no other part is loaded"
    else:
        record_advice(conversion, name, value)


def _pissa(conversion: Conversion, name: str, value: Any) -> None:
    """Convert LLaMA-Factory's PiSSA with its number of iterations, -1 for an exact decomposition."""
    steps = as_number(conversion.settings.get("pissa_iter", 16))
    if value in UNSET:
        conversion.not_needed[name] = "not set"
    else:
        conversion.convert(name, adapter__init=f"pissa_niter_{steps:.0f}" if steps and steps > 0 else "pissa")


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


# ---- AutoModel


def _batch_of_a_step(conversion: Conversion, name: str, value: Any) -> None:
    """Convert rows per optimizer step to micro-batches of one process."""
    rows, micro = as_number(value), as_number(conversion.settings.get(conversion.facts["rows"]))
    if not rows or not micro or rows % micro:
        conversion.not_converted[name] = f"{format_value(value)}: not a multiple of {conversion.facts['rows']}"
        return
    conversion.convert(name, batching__accumulation=int(rows / micro))
    conversion.changed.append(
        f"{name}: {format_value(value)}: batching.accumulation counts per process; divide it by the number of GPUs"
    )


def _betas(conversion: Conversion, name: str, value: Any) -> None:
    if isinstance(value, list) and len(value) == 2:
        conversion.convert(name, optimizer__beta1=value[0], optimizer__beta2=value[1])
    else:
        conversion.not_converted[name] = f"{format_value(value)}: not two numbers"


def _final_rate(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the final learning rate to a fraction of the peak."""
    rate, peak = as_number(value), as_number(conversion.settings.get("optimizer.lr"))
    if rate is not None and peak:
        conversion.convert(name, schedule__final_fraction=float(f"{rate / peak:.6g}"))
    else:
        conversion.not_converted[name] = (
            f"{format_value(value)}: a fraction of optimizer.lr, which the file does not set"
        )


def _pack_size(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the tokens of a pack; 0 pads rows."""
    if value in UNSET or not as_number(value):
        conversion.convert(name, batching__packing=False)
    else:
        conversion.convert(name, batching__packing=True, dataset__max_length=value)


_READ_ROWS = ("ChatDataset", "ColumnMappedTextInstructionDataset")  # classes whose rows are columns of files


def _row_class(conversion: Conversion, name: str) -> str:
    target = conversion.settings.get(f"{name.partition('.')[0]}._target_")
    return str(target).rpartition(".")[2]


def _automodel_class(conversion: Conversion, name: str, value: Any) -> None:
    """Record a dataset class: columns are read, and rows made by code are not."""
    if _row_class(conversion, name) in _READ_ROWS:
        conversion.not_needed[name] = "the format is detected from the columns of the rows"
    else:
        conversion.not_converted[name] = f"{value}: rows made by code. Set dataset=FILE, or a hub ID ORG/NAME"


def _automodel_optimizer(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the optimizer class; Adam without weight decay equals AdamW."""
    kind = str(value).rpartition(".")[2]
    if kind == "AdamW" or (kind == "Adam" and not as_number(conversion.settings.get("optimizer.weight_decay"))):
        conversion.convert(name, optimizer="adamw")
    else:
        conversion.not_converted[name] = f"{value}: set optimizer=adamw, or another one of conf/optimizer"


def _automodel_rows(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the path of a dataset whose class reads columns."""
    section = name.partition(".")[0]
    if _row_class(conversion, name) not in _READ_ROWS:
        conversion.not_needed[name] = f"see {section}._target_"
    elif section == "dataset":
        conversion.convert(name, dataset="auto", dataset__path=value)
    else:
        conversion.convert(name, dataset__eval_path=value)


def _automodel_schedule(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the schedule, whose warmup is a tenth of the steps by default."""
    by_table(conversion, name, value)
    if "lr_scheduler.lr_warmup_steps" not in conversion.settings:
        conversion.words["schedule.warmup_fraction"] = 0.1


def _shuffle(conversion: Conversion, name: str, value: Any) -> None:
    if value is False:
        conversion.convert(name, batching__order="sequential")
    else:
        conversion.not_needed[name] = "default"


def _column_mapping(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a column of the training rows; the eval rows have the same."""
    column = name.rpartition(".")[2]
    if column in ("question", "answer"):
        conversion.convert(name, dataset="question_answer", **{f"dataset.columns.{column}": value})
    else:
        conversion.not_converted[name] = f"{format_value(value)}: dataset.columns"


_AUTOMODEL = {
    **{f"{section}._target_": _automodel_class for section in ("dataset", "validation_dataset")},
    **{f"{section}.path_or_dataset_id": _automodel_rows for section in ("dataset", "validation_dataset")},
    **{f"{section}.dataset_name": _automodel_rows for section in ("dataset", "validation_dataset")},
    "optimizer._target_": _automodel_optimizer,
    "lr_scheduler.lr_decay_style": _automodel_schedule,
    **{f"dataset.column_mapping.{column}": _column_mapping for column in ("context", "question", "answer")},
    "step_scheduler.global_batch_size": _batch_of_a_step,
    "optimizer.betas": _betas,
    "lr_scheduler.min_lr": _final_rate,
    "packed_sequence.packed_sequence_size": _pack_size,
    "dataloader.shuffle": _shuffle,
}
_TOKENS = tuple(f"special_tokens.{kind}_token" for kind in ("bos", "eos", "unk"))
_V1_DATASETS = ("train_dataset", "eval_dataset")

_ATTENTION = ("flash_attention", "flash_attn", "attn_implementation", "attn_impl", "sdp_attention")

_SPECIAL = {
    ("axolotl", "datasets"): datasets,
    ("trl", "datasets"): datasets,
    ("axolotl", "test_datasets"): held_out,
    ("llama_factory", "dataset"): named_datasets,
    ("llama_factory", "eval_dataset"): named_datasets,
    **{("llama_factory_v1", name): dataset_file for name in _V1_DATASETS},
    ("llama_factory_v1", "global_batch_size"): _batch_of_a_step,
    ("llama_factory_v1", "dist_config.config_file"): _deepspeed,
    ("swift", "dataset"): swift_datasets,
    ("swift", "val_dataset"): swift_datasets,
    ("trl", "dataset_name"): paths,
    ("unsloth", "data.dataset"): paths,
    ("axolotl", "chat_template"): _template,
    **{(program, "template"): _template for program in ("llama_factory", "llama_factory_v1", "swift")},
    **{("axolotl", name): _special_token for name in _TOKENS},
    ("axolotl", "plugins"): _plugins,
    ("axolotl", "unfrozen_parameters"): _trained_parts,
    ("llama_factory", "stage"): _stage,
    ("llama_factory", "pref_loss"): _loss_of_pairs,
    ("llama_factory", "pissa_init"): _pissa,
    ("torchtune", "dataset._component_"): _data_of_code,
    ("torchtune", "dataset.source"): paths,
    **{("torchtune", f"{name}._component_"): _component for name in ("optimizer", "lr_scheduler", "metric_logger")},
    ("torchtune", "model.lora_attn_modules"): _targets,
    ("torchtune", "max_steps_per_epoch"): _steps_per_epoch,
    **{("automodel", name): convert for name, convert in _AUTOMODEL.items()},
    **{("", name): _targets for name in ("lora_target", "lora_target_modules", "target_modules", "oft_target")},
    **{("", name): _per_epoch for name in ("evals_per_epoch", "saves_per_epoch")},
    **{("", name): _strategy for name in ("eval_strategy", "evaluation_strategy", "save_strategy")},
    **{("", name): _steps for name in ("eval_steps", "save_steps")},
    **{("", name): _warm_up for name in ("warmup_steps", "warmup_ratio")},
    **{("", name): _precision for name in ("bf16", "fp16")},
    **{("", name): _other_precision for name in ("tf32", "torch_dtype", "bfloat16", "bnb_4bit_compute_dtype")},
    ("trl", "dtype"): _other_precision,
    ("trl", "max_length"): _length,
    ("axolotl", "wandb_project"): _wandb,
    ("unsloth", "logging.wandb_project"): _wandb,
    ("unsloth", "logging.enable_wandb"): _wandb,
    **{("", name): _bits for name in ("bnb_4bit_quant_type", "use_bnb_nested_quant", "double_quantization")},
    ("", "bnb_4bit_use_double_quant"): _bits,
    ("", "deepspeed"): _deepspeed,
    ("", "trust_remote_code"): _remote_code,
    **{("", name): _one_of_a_list for name in ("report_to", "loss_type", "dpo_loss_type")},
    **{("", name): _attention for name in _ATTENTION},
    ("axolotl", "attention"): _attention,
}
