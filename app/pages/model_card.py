"""Model card of a finished run for model hubs: description, code that loads the model, settings, data and metrics."""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from app.config.adapters import name_of
from app.config.kinds import QUANTIZATION_KINDS
from app.config.tasks import TASKS
from app.pages.page import Block, Code, Facts, Inline, Page, Paragraph, Section, Span, Table, as_markdown
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
# folders of a path that starts at the root, the home folder or the current folder
_FOLDERS = re.compile(r"(?<![^=,\[{:'\"\s(])(?:~|\.\.?)?/(?!/)(?:[^,\[\]{}'\"=]*/)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Facts needed to load the model in the folder of the card."""

    auto_class: str
    adapter: Mapping[str, Any] | None = None  # content of adapter_config.json; None for a full model
    dtype: str  # base dtype
    base_place: str | None = None  # path of a base with random weights, relative to the card
    quantization: str = "none"
    bitsandbytes: Mapping[str, Any] | None = None  # arguments of BitsAndBytesConfig for the same quantization
    made_of: str = ""  # sentence on the merged parts
    quantized: str = ""  # sentence on the difference to the model before quantization
    commands: str = ""  # commands that load the model, if no Python code does
    own_classes: bool = False  # the adapter has a config.json with the class names
    needs_transformers_5: bool = False
    rows: int | None = None  # embedding rows, if the adapter needs more than its base has
    rope: Mapping[str, Any] | None = None  # values of config.json of the scaled RoPE, which the adapter does not store

    @property
    def is_adapter(self) -> bool:
        return self.adapter is not None

    def code(self, model: Mapping[str, Any]) -> str:
        """Return Python code that loads the model from the folder of the card."""
        auto = ["AutoTokenizer", self.auto_class, *(["BitsAndBytesConfig"] if self.bitsandbytes else [])]
        auto += ["AutoConfig"] if self.own_classes or self.rope is not None else []
        lines = [f"from transformers import {', '.join(sorted(auto))}", "", 'here = "."  # folder of this file']
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
            yield f"base_folder = {place}  # path of this model"
            place = "base_folder"
        options = f"dtype={json.dumps(self.dtype)}"
        if self.bitsandbytes is not None:
            arguments = ", ".join(f"{key}={value!r}" for key, value in self.bitsandbytes.items())
            yield f"{self.quantization} = BitsAndBytesConfig({arguments})"
            options += f", quantization_config={self.quantization}"
        if self.own_classes:
            yield "classes = AutoConfig.from_pretrained(here)"
            options += ", config=classes"
        if self.rope is not None:
            yield f"settings = AutoConfig.from_pretrained({place})"
            yield "text = settings.get_text_config()  # with the RoPE of the training, which an adapter does not store"
            yield from (f"text.{name} = {value!r}" for name, value in self.rope.items())
            options += ", config=settings"
        yield f"base = {self.auto_class}.from_pretrained({place}, {options})"
        if self.rows is not None:
            yield f"base.resize_token_embeddings({self.rows})  # rows for new tokens"


def model_card(run: Mapping[str, Any], manifest: Mapping[str, Any], result: Mapping[str, Any], loading: Loading) -> str:
    """Return the card of a run as Markdown with YAML metadata; secrets are masked."""
    return safe_text(f"{_front(run, loading)}\n\n{as_markdown(card_page(run, manifest, result, loading))}")


def card_page(run: Mapping[str, Any], manifest: Mapping[str, Any], result: Mapping[str, Any], loading: Loading) -> Page:
    """Return the card without metadata."""
    model = run["model"]
    subject = f"{name_of(run['adapter'])} adapter" if loading.is_adapter else "Model"
    base = "random weights" if model["weights"] == "random" else _base_name(model)
    code = Code(loading.commands) if loading.commands else Code(loading.code(model), "python")
    settings = Table(("setting", "value"), list(_settings(run)))
    metrics = Table(("metric", "value", "95% interval", "before training"), list(_metrics(result)))
    smoothed = Paragraph(
        "train_loss is the mean of the last logged training losses (a tenth, 10 to 100, at most half)."
    )
    note = Paragraph("eval_loss and the metrics below it are measured on the eval set with this model.")
    has_loss, has_scores = result.get("train_loss") is not None, bool(result.get("final_metrics"))
    return Page(
        heading=f"{subject}, fine-tuned from {base}",
        about=[Paragraph(f"Task: {run['task']['kind']}. Base: {base}.")],
        sections=[
            Section("How to load", [code, *_serving(run, loading)]),
            Section("Training", [settings, Code(_command(manifest), intro="Command:")]),
            Section("Data", [Table(("", "train", "eval"), list(_data(manifest)))]),
            Section("Metrics", [metrics, *[smoothed] * has_loss, *[note] * has_scores]),
            Section("License", [Paragraph(_license(model.get("licence_page")))]),
            Section("Environment", [Facts(list(_origin(manifest, result)))]),
        ],
    )


def _license(address: str | None) -> list[Inline]:
    """Return the license note, with a link if the address is a valid URL."""
    is_link = address and address.startswith(("https://", "http://")) and not set(address) & set("<> \n\t")
    where: list[Inline] = [": ", Span(address, link=address if is_link else None)] if address else []
    return ["The license of the base model applies", *where, ". The license of the training data may apply too."]


def _front(run: Mapping[str, Any], loading: Loading) -> str:
    """Return the YAML metadata for hubs; JSON strings are valid YAML."""
    model = run["model"]
    license = {"license": "other", "license_name": "base-model-license", "license_link": model.get("licence_page")}
    library = "peft" if loading.is_adapter else "transformers"
    metadata = {
        "library_name": "llama.cpp" if loading.commands else library,
        "pipeline_tag": _PIPELINES.get(loading.auto_class),
        **({"base_model": model["path"]} if _is_hub_id(model) else {}),
        **({"base_model_relation": "adapter" if loading.is_adapter else "finetune"} if _is_hub_id(model) else {}),
        **(license if model.get("licence_page") else {}),
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in metadata.items() if value), "---"])


def _is_hub_id(model: Mapping[str, Any]) -> bool:
    path = str(model["path"])
    is_path = path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).is_dir()
    return model["weights"] == "pretrained" and not is_path


def _base_name(model: Mapping[str, Any]) -> str:
    """Return the name of the base model without local folders."""
    path = str(model["path"])
    return path if _is_hub_id(model) else PurePath(path).name


def _serving(run: Mapping[str, Any], loading: Loading) -> Iterator[Block]:
    refused = problems_in_vllm(loading.adapter or {"peft_type": "LORA"}, loading.rows)
    export = ("export the run with ", Span("kind=merged", "code"), ".")
    if loading.made_of:
        yield Paragraph(loading.made_of)
    if loading.rope is not None:
        scaled = "The adapter was trained with a scaled RoPE, which it does not store and the code above sets. "
        yield Paragraph((scaled, "For programs that load the base as it is, ", *export))
    if loading.quantized:
        yield Paragraph(loading.quantized)
    elif loading.bitsandbytes is not None:
        warning = (
            "The adapter was trained on a base quantized to "
            f"{QUANTIZATION_KINDS[loading.quantization].rounds_to} and compensates for the quantization error: on "
            "another base, answers differ. For programs that load another base, "
        )
        yield Paragraph((warning, *export))
    elif loading.auto_class == "AutoModelForCausalLM" and loading.adapter is not None and refused:
        yield Paragraph((f"vLLM {' and '.join(refused)}. For such programs, ", *export))
    elif loading.auto_class == "AutoModelForCausalLM" and loading.rope is None:
        base = loading.base_place or (_base_name(run["model"]) if _is_hub_id(run["model"]) else "BASE_FOLDER")
        command = "vllm serve ."
        if loading.adapter is not None:
            command = f"vllm serve {shlex.quote(base)} {options_of_vllm(loading.adapter)} --lora-modules tuned=."
        yield Code(command, intro="Serve with vLLM:")
    if loading.needs_transformers_5:
        yield Paragraph("Requires transformers 5: earlier versions use other RoPE names for this model type.")


def _settings(run: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for section, keys in _SETTINGS.items():
        values = run.get(section, {})
        for key in ("kind",) if values.get("kind") == "none" else keys:
            has_rank = key not in ("r", "alpha") or values.get("r")
            if has_rank and values.get(key) not in (None, [], {}, ""):
                yield f"{section}.{key}", _text(values[key])
    yield "seed", _text(run["seed"])


def _command(manifest: Mapping[str, Any]) -> str:
    """Return the command of the first start, without local folders."""
    starts: list[dict[str, Any]] = manifest.get("starts", [])
    words = [_without_folders(word) for start in starts[:1] for word in start["command_line"][1:] if "=" in word]
    return " ".join(["finetune train", *map(shlex.quote, words)])


def _data(manifest: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    data = manifest.get("counts", {}).get("data", {})
    train, held_out = data.get("train") or {}, data.get("eval") or {}
    for key in _OF_SPLIT:
        if train.get(key) or held_out.get(key):
            yield key.replace("_", " "), *(_without_folders(_text(split.get(key, ""))) for split in (train, held_out))


def _without_folders(text: str) -> str:
    """Return text without local folders; several sources are joined by a plus."""
    return " + ".join(_FOLDERS.sub("", source) for source in text.split(" + "))


def _metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key in ("steps", "train_loss_first", "train_loss"):
        if result.get(key) is not None:
            yield key, _text(result[key]), "", ""
    final: Mapping[str, float] = result.get("final_metrics") or {}
    start: Mapping[str, float] = result.get("start_metrics") or {}
    for key, value in final.items():
        margin = final.get(f"{key}_margin")
        if not key.endswith("_margin"):
            yield key, _text(value), "" if margin is None else f"± {_text(margin)}", _text(start.get(key, ""))


def _origin(manifest: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    hardware, choices = manifest.get("hardware", {}), manifest.get("choices", {})
    yield "device", hardware.get("gpu") or f"{hardware.get('cpu', 'unknown')} CPU, {manifest.get('cpus')} cores"
    yield "processes", _text(choices.get("processes") or "")
    yield "precision", choices.get("precision")
    peak = result.get("peak_memory_bytes")
    yield "peak memory", None if peak is None else format_bytes(peak)
    packages = manifest.get("packages", {})
    names = ("torch", "transformers", "peft", "bitsandbytes")
    yield "packages", ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    yield "python", manifest.get("python")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
