"""Model card of a finished run, in the Markdown of hubs: what the model is, how to load it, how it was made."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from app.config.adapters import name_of
from app.config.quantizations import QUANTIZATION_KINDS
from app.config.tasks import TASKS
from app.safe_text import safe_text
from app.tracking.formatting import format_bytes
from app.tracking.vllm import options_of_vllm, problems_in_vllm

CARD = "README.md"
_SETTINGS = {
    "adapter": ("kind", "method", "fields", "r", "alpha", "dropout", "lr_ratio", "targets"),
    "quantization": ("kind", "double_quant"),
    "optimizer": ("kind", "lr", "weight_decay"),
    "schedule": ("kind", "warmup_fraction", "warmup_steps", "final_fraction"),
    "training": ("epochs", "max_steps", "clip"),
    "batching": ("packing", "tokens", "rows", "accumulation"),
    "dataset": ("format", "train_on", "max_length", "on_overflow", "eval_fraction"),
    "task": ("kind", "mask_share", "problem", "labels", "class_weights"),
}
_OF_SPLIT = ("source", "rows_read", "samples", "tokens", "trained_tokens", "dropped", "truncated", "bad_rows")
_PIPELINES = {task.auto_class: task.pipeline for task in TASKS.values()}
# the folders of a path that begins at the root, at home or in the current folder
_FOLDERS = re.compile(r"(?<![^=,\[{:'\"\s(])(?:~|\.\.?)?/(?!/)(?:[^,\[\]{}'\"=]*/)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How to load the model that lies beside the card."""

    auto_class: str
    adapter: Mapping[str, Any] | None = None  # content of adapter_config.json; None: a whole model
    dtype: str  # of the base
    base_place: str | None = None  # of a base with random weights, from the folder of the card
    quantization: str = "none"
    bitsandbytes: Mapping[str, Any] | None = None  # arguments of BitsAndBytesConfig that quantise alike
    made_of: str = ""  # a sentence on what was put together
    quantized: str = ""  # a sentence on how far the quantised model is from the one before
    commands: str = ""  # that load it, where no code of Python does
    own_classes: bool = False  # the adapter brings a config.json that names the classes
    needs_transformers_5: bool = False
    rows: int | None = None  # of the embedding, where the adapter needs more than its base has

    @property
    def is_adapter(self) -> bool:
        return self.adapter is not None

    def code(self, model: Mapping[str, Any]) -> str:
        """Python code that loads it, to run in the folder of the card."""
        auto = ["AutoTokenizer", self.auto_class, *(["BitsAndBytesConfig"] if self.bitsandbytes else [])]
        auto += ["AutoConfig"] if self.own_classes else []
        lines = [f"from transformers import {', '.join(sorted(auto))}", "", 'here = "."  # the folder of this file']
        if self.is_adapter:
            lines = ["from peft import PeftModel", *lines, *self._base_lines(model)]
            lines.append("model = PeftModel.from_pretrained(base, here)")
        else:
            lines.append(f'model = {self.auto_class}.from_pretrained(here, dtype="auto")')
        return "\n".join([*lines, "tokenizer = AutoTokenizer.from_pretrained(here)"])

    def _base_lines(self, model: Mapping[str, Any]) -> Iterable[str]:
        place = json.dumps(_base_name(model))
        if self.base_place is not None:
            place = f'f"{{here}}/{self.base_place}"'
        elif not _is_hub_id(model):
            yield f"base_folder = {place}  # wherever this model lies"
            place = "base_folder"
        options = f"dtype={json.dumps(self.dtype)}"
        if self.bitsandbytes is not None:
            arguments = ", ".join(f"{key}={value!r}" for key, value in self.bitsandbytes.items())
            yield f"{self.quantization} = BitsAndBytesConfig({arguments})"
            options += f", quantization_config={self.quantization}"
        if self.own_classes:
            yield "classes = AutoConfig.from_pretrained(here)"
            options += ", config=classes"
        yield f"base = {self.auto_class}.from_pretrained({place}, {options})"
        if self.rows is not None:
            yield f"base.resize_token_embeddings({self.rows})  # rows for new tokens"


def model_card(run: Mapping[str, Any], manifest: Mapping[str, Any], result: Mapping[str, Any], loading: Loading) -> str:
    """The card of a run, from its settings and files; secrets are masked and Markdown in values is escaped."""
    model, licence = run["model"], run["model"].get("licence_page")
    subject = f"{name_of(run['adapter'])} adapter" if loading.is_adapter else "Model"
    base = _cell("random weights" if model["weights"] == "random" else _base_name(model))
    parts = [
        _front(run, loading),
        f"# {subject}, tuned from {base}",
        f"Task: {run['task']['kind']}. Base: {base}.",
        "## Loading it",
        f"```\n{loading.commands}\n```" if loading.commands else f"```python\n{loading.code(model)}\n```",
        *_serving(run, loading),
        "## Recipe",
        _table(("setting", "value"), _settings(run)),
        f"The command:\n\n```\n{_command(manifest)}\n```",
        "## Data",
        _table(("", "train", "held out"), _data(manifest)),
        "## Metrics",
        _table(("metric", "value", "95 % interval", "before training"), _metrics(result)),
        "From eval\\_loss on: of the held-out rows, by this model." if result.get("final_metrics") else "",
        "## Licence",
        f"That of the base holds for what was made of it{f': {_link(licence)}' if licence else ''}. So may that of the "
        "data.",
        "## Made with",
        _table(("", ""), _origin(manifest, result)),
    ]
    return safe_text("\n\n".join(part for part in parts if part)) + "\n"


def _front(run: Mapping[str, Any], loading: Loading) -> str:
    """YAML metadata for hubs; JSON strings are YAML."""
    model = run["model"]
    licence = {"license": "other", "license_name": "that-of-the-base", "license_link": model.get("licence_page")}
    library = "peft" if loading.is_adapter else "transformers"
    named = {
        "library_name": "llama.cpp" if loading.commands else library,
        "pipeline_tag": _PIPELINES.get(loading.auto_class),
        **({"base_model": model["path"]} if _is_hub_id(model) else {}),
        **({"base_model_relation": "adapter" if loading.is_adapter else "finetune"} if _is_hub_id(model) else {}),
        **(licence if model.get("licence_page") else {}),
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in named.items() if value), "---"])


def _is_hub_id(model: Mapping[str, Any]) -> bool:
    path = str(model["path"])
    is_path = path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).is_dir()
    return model["weights"] == "pretrained" and not is_path


def _base_name(model: Mapping[str, Any]) -> str:
    """The base without folders of this machine."""
    path = str(model["path"])
    return path if _is_hub_id(model) else PurePath(path).name


def _serving(run: Mapping[str, Any], loading: Loading) -> Iterable[str]:
    refused = problems_in_vllm(loading.adapter or {"peft_type": "LORA"}, loading.rows)
    if loading.made_of:
        yield loading.made_of
    if loading.quantized:
        yield loading.quantized
    elif loading.bitsandbytes is not None:
        yield (
            "The adapter has learnt to make up for the rounding of its base to "
            f"{QUANTIZATION_KINDS[loading.quantization].rounds_to}: on a base that is not quantised so, its answers "
            "are others. For programs that load such a base, export the run with `kind=merged`."
        )
    elif loading.auto_class == "AutoModelForCausalLM" and loading.adapter is not None and refused:
        yield f"vLLM {' and '.join(refused)}. For programs like it, export the run with `kind=merged`."
    elif loading.auto_class == "AutoModelForCausalLM":
        base = loading.base_place or (_base_name(run["model"]) if _is_hub_id(run["model"]) else "BASE_FOLDER")
        command = "vllm serve ."
        if loading.adapter is not None:
            command = f"vllm serve {shlex.quote(base)} {options_of_vllm(loading.adapter)} --lora-modules tuned=."
        yield f"In vLLM:\n\n```\n{command}\n```"
    if loading.needs_transformers_5:
        yield "Needs transformers 5: earlier versions have other names for the rope of this kind of model."


def _settings(run: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    for section, keys in _SETTINGS.items():
        values = run.get(section, {})
        for key in ("kind",) if values.get("kind") == "none" else keys:
            has_rank = key not in ("r", "alpha") or values.get("r")
            if has_rank and values.get(key) not in (None, [], {}, ""):
                yield f"{section}.{key}", values[key]
    yield "seed", run["seed"]


def _command(manifest: Mapping[str, Any]) -> str:
    """The words of the first start, as they would be typed elsewhere."""
    starts: list[dict[str, Any]] = manifest.get("starts", [])
    words = [_without_folders(word) for start in starts[:1] for word in start["command_line"][1:] if "=" in word]
    return " ".join(["python -m app.train", *map(shlex.quote, words)]).replace("`", "'")


def _data(manifest: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    data = manifest.get("counts", {}).get("data", {})
    train, held = data.get("train") or {}, data.get("eval") or {}
    for key in _OF_SPLIT:
        if train.get(key) or held.get(key):
            yield key.replace("_", " "), *(_without_folders(each.get(key, "")) for each in (train, held))


def _without_folders(value: Any) -> Any:
    """Text without the folders of this machine; several sources are joined by a plus."""
    return " + ".join(_FOLDERS.sub("", each) for each in value.split(" + ")) if isinstance(value, str) else value


def _metrics(result: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    for key in ("steps", "train_loss_first", "train_loss_last"):
        yield key, result.get(key), "", ""
    found: Mapping[str, float] = result.get("final_metrics") or {}
    start: Mapping[str, float] = result.get("start_metrics") or {}
    for key, value in found.items():
        margin = found.get(f"{key}_margin")
        if not key.endswith("_margin"):
            yield key, value, "" if margin is None else f"± {_cell(margin)}", start.get(key, "")


def _origin(manifest: Mapping[str, Any], result: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    hardware, choices = manifest.get("hardware", {}), manifest.get("choices", {})
    yield ("device", hardware.get("gpu") or f"{hardware.get('cpu', 'unknown')} CPU, {manifest.get('cpus')} cores")
    yield "processes", choices.get("processes")
    yield "precision", choices.get("precision")
    peak = result.get("peak_memory_bytes")
    yield "peak memory", None if peak is None else format_bytes(peak)
    packages = manifest.get("packages", {})
    names = ("torch", "transformers", "peft", "bitsandbytes")
    yield "packages", ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    yield "python", manifest.get("python")


def _table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> str:
    lines = [_row(head), _row("---" for _ in head)]
    return "\n".join([*lines, *(_row(map(_cell, row)) for row in rows if row[1] is not None)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _link(address: str) -> str:
    """A link in angle brackets, where Markdown needs no escape, if the address can be one."""
    is_plain = address.startswith(("https://", "http://")) and not set(address) & set("<> \n\t")
    return f"<{address}>" if is_plain else _cell(address)


def _cell(value: Any) -> str:
    """A value as text, with Markdown and HTML escaped."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_[]|#":
        text = text.replace(sign, f"\\{sign}")
    return text
