"""Model card of a finished run, in the Markdown of hubs: what the model is, how to load it, how it was made."""

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
    bitsandbytes: Mapping[str, Any] | None = None  # arguments of BitsAndBytesConfig that quantize alike
    made_of: str = ""  # a sentence on what was put together
    quantized: str = ""  # a sentence on how far the quantized model is from the one before
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
    """The card of a run as Markdown with metadata in front, from its settings and files; secrets are masked."""
    return safe_text(f"{_front(run, loading)}\n\n{as_markdown(card_page(run, manifest, result, loading))}")


def card_page(run: Mapping[str, Any], manifest: Mapping[str, Any], result: Mapping[str, Any], loading: Loading) -> Page:
    """The card without its metadata."""
    model = run["model"]
    subject = f"{name_of(run['adapter'])} adapter" if loading.is_adapter else "Model"
    base = "random weights" if model["weights"] == "random" else _base_name(model)
    code = Code(loading.commands) if loading.commands else Code(loading.code(model), "python")
    settings = Table(("setting", "value"), list(_settings(run)))
    metrics = Table(("metric", "value", "95 % interval", "before training"), list(_metrics(result)))
    of_held_out = Paragraph("From eval_loss on: of the held-out rows, by this model.")
    return Page(
        heading=f"{subject}, tuned from {base}",
        about=[Paragraph(f"Task: {run['task']['kind']}. Base: {base}.")],
        sections=[
            Section("Loading it", [code, *_serving(run, loading)]),
            Section("Recipe", [settings, Code(_command(manifest), intro="The command:")]),
            Section("Data", [Table(("", "train", "held out"), list(_data(manifest)))]),
            Section("Metrics", [metrics, *([of_held_out] if result.get("final_metrics") else [])]),
            Section("License", [Paragraph(_license(model.get("licence_page")))]),
            Section("Made with", [Facts(list(_origin(manifest, result)))]),
        ],
    )


def _license(address: str | None) -> list[Inline]:
    """A sentence, with a link if the address can be one."""
    is_link = address and address.startswith(("https://", "http://")) and not set(address) & set("<> \n\t")
    where: list[Inline] = [": ", Span(address, link=address if is_link else None)] if address else []
    return ["That of the base holds for what was made of it", *where, ". So may that of the data."]


def _front(run: Mapping[str, Any], loading: Loading) -> str:
    """YAML metadata for hubs; JSON strings are YAML."""
    model = run["model"]
    license = {"license": "other", "license_name": "that-of-the-base", "license_link": model.get("licence_page")}
    library = "peft" if loading.is_adapter else "transformers"
    named = {
        "library_name": "llama.cpp" if loading.commands else library,
        "pipeline_tag": _PIPELINES.get(loading.auto_class),
        **({"base_model": model["path"]} if _is_hub_id(model) else {}),
        **({"base_model_relation": "adapter" if loading.is_adapter else "finetune"} if _is_hub_id(model) else {}),
        **(license if model.get("licence_page") else {}),
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


def _serving(run: Mapping[str, Any], loading: Loading) -> Iterator[Block]:
    refused = problems_in_vllm(loading.adapter or {"peft_type": "LORA"}, loading.rows)
    export = ("export the run with ", Span("kind=merged", "code"), ".")
    if loading.made_of:
        yield Paragraph(loading.made_of)
    if loading.quantized:
        yield Paragraph(loading.quantized)
    elif loading.bitsandbytes is not None:
        learned = (
            "The adapter has learnt to make up for the rounding of its base to "
            f"{QUANTIZATION_KINDS[loading.quantization].rounds_to}: on a base that is not quantized so, its answers "
            "are others. For programs that load such a base, "
        )
        yield Paragraph((learned, *export))
    elif loading.auto_class == "AutoModelForCausalLM" and loading.adapter is not None and refused:
        yield Paragraph((f"vLLM {' and '.join(refused)}. For programs like it, ", *export))
    elif loading.auto_class == "AutoModelForCausalLM":
        base = loading.base_place or (_base_name(run["model"]) if _is_hub_id(run["model"]) else "BASE_FOLDER")
        command = "vllm serve ."
        if loading.adapter is not None:
            command = f"vllm serve {shlex.quote(base)} {options_of_vllm(loading.adapter)} --lora-modules tuned=."
        yield Code(command, intro="In vLLM:")
    if loading.needs_transformers_5:
        yield Paragraph("Needs transformers 5: earlier versions have other names for the rope of this kind of model.")


def _settings(run: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for section, keys in _SETTINGS.items():
        values = run.get(section, {})
        for key in ("kind",) if values.get("kind") == "none" else keys:
            has_rank = key not in ("r", "alpha") or values.get("r")
            if has_rank and values.get(key) not in (None, [], {}, ""):
                yield f"{section}.{key}", _text(values[key])
    yield "seed", _text(run["seed"])


def _command(manifest: Mapping[str, Any]) -> str:
    """The words of the first start, as they would be typed elsewhere."""
    starts: list[dict[str, Any]] = manifest.get("starts", [])
    words = [_without_folders(word) for start in starts[:1] for word in start["command_line"][1:] if "=" in word]
    return " ".join(["finetune train", *map(shlex.quote, words)])


def _data(manifest: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    data = manifest.get("counts", {}).get("data", {})
    train, held = data.get("train") or {}, data.get("eval") or {}
    for key in _OF_SPLIT:
        if train.get(key) or held.get(key):
            yield key.replace("_", " "), *(_without_folders(_text(each.get(key, ""))) for each in (train, held))


def _without_folders(text: str) -> str:
    """Text without the folders of this machine; several sources are joined by a plus."""
    return " + ".join(_FOLDERS.sub("", each) for each in text.split(" + "))


def _metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key in ("steps", "train_loss_first", "train_loss_last"):
        if result.get(key) is not None:
            yield key, _text(result[key]), "", ""
    found: Mapping[str, float] = result.get("final_metrics") or {}
    start: Mapping[str, float] = result.get("start_metrics") or {}
    for key, value in found.items():
        margin = found.get(f"{key}_margin")
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
