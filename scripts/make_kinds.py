"""Test every transformers model type as a tiny model, and write the table and page of supported types.

python -m scripts.make_kinds [SECTION ...]

Models are built in training mode from scripts/tiny_kinds.yaml, without dropout and with an adapter, and run on
documents of several lengths: in one row, in padded rows, and in padded rows with the model's own attention. The tier is
the first of these that gives the loss and weight gradients of separate documents with the model's eager attention.
Linear layers that the training pass does not call are recorded, because an adapter would not learn there.
"""

import contextlib
import json
import logging
import os
import re
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor

from app.assets import ROOT
from app.base.base_model import BaseModel
from app.base.supported_models import OWN_ATTENTION, tier_of
from app.batch import Batch
from app.config.kinds import OWN, PACKED, PADDED, REFUSED, Tier, model_kinds, without_numbers
from app.config.schema import AdapterConfig, ModelConfig, PreferenceConfig, QuantizationConfig, TaskConfig
from app.config.tasks import TASKS, Task, task_of
from app.data.collate import BinShape, collate_packed, collate_padded
from app.data.objectives import LabeledTokens, label_next_tokens
from app.errors import AppError, gist
from app.layers.head import in_backbone
from app.layers.quantization import is_linear
from app.model.build import ModelSections, build_training_model
from app.model.checks import check_causal, check_head, check_packing
from app.model.training_model import TrainingModel
from app.tasks.table import IMPLEMENTATIONS
from scripts.tiny_kinds import architecture, tables

TABLE = ROOT / "model_kinds.json"
WHOLES = "image_text"  # multimodal models, trained on text by task=causal
SECTIONS = ("causal", WHOLES, "masked", "classification")
_LENGTHS = (21, 64, 13, 90, 40)  # longer than the windows of 8 and the top-k of an index
_ALLOWED = 1e-4  # relative to the norm of all gradients, in float32
_MODES = {PACKED: "sdpa", PADDED: "sdpa", OWN: OWN}


def kinds_of(section: str) -> list[str]:
    """Return the model types with a transformers class; for `image_text`, without causal language models."""
    from transformers.models.auto import modeling_auto

    if section != WHOLES:
        return list(getattr(modeling_auto, f"{TASKS[section].mapping}_NAMES"))
    return [kind for kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if kind not in kinds_of("causal")]


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    of_numbers: bool  # wrong results; otherwise the type itself is not supported
    of_code: bool = False  # may be caused by the tiny sizes


def proven_tier(task: Task, kind: str) -> Tier:
    """Return the best tier of a model type for which a tiny model computes correct results."""
    try:
        config = ModelConfig(path="asset:tiny", weights="random", architecture=architecture(kind))
        numbers = BaseModel(config, task).numbers
    except Exception as fault:  # noqa: BLE001  from the configuration of any type
        return Tier(REFUSED, f"no tiny model could be built: {_in_words(fault)}", compared=False)
    if numbers.model_type != kind:  # text part of a multimodal model
        return replace(proven_tier(task, numbers.model_type), text_of=numbers.model_type)
    types = tuple(sorted(set(getattr(numbers.get_text_config(decoder=True), "layer_types", None) or ())))
    with _assumed(task, kind, Tier(PACKED, layers=types)):
        if not (assumed := tier_of(config, task, numbers)).accepted:
            return Tier(REFUSED, assumed.reason, compared=False)
    with _assumed(task, kind, None):
        unknown = tier_of(config, task, numbers)
    reasons = [unknown.reason] if unknown.name == OWN else []
    for name in (OWN,) if reasons else (PACKED, PADDED, OWN):
        with _assumed(task, kind, Tier(name, layers=types)):
            result = _try(config, task, name)
        if not isinstance(result, _Failure):
            reason = next(iter(reasons), "")
            return Tier(name, reason, layers=() if unknown.accepted else types, uncalled=result)
        failure = result
        if not failure.of_numbers:
            return Tier(REFUSED, failure.reason, compared=False)
        reasons.append(OWN_ATTENTION if failure.of_code else failure.reason)
    return Tier(REFUSED, failure.reason if unknown.accepted else unknown.reason, compared=not failure.of_code)


@contextlib.contextmanager
def _assumed(task: Task, kind: str, tier: Tier | None) -> Iterator[None]:
    """Assume `tier` for a model type inside the context, or treat the type as unknown."""
    tables, section = model_kinds().tasks, task.name
    if task.name == "causal" and kind in tables.get(WHOLES, {}):
        section = WHOLES
    before = tables.get(section, {})
    others = {name: entry for name, entry in before.items() if name != kind}
    tables[section] = others if tier is None else {**others, kind: tier}
    try:
        yield
    finally:
        tables[section] = before


def _try(config: ModelConfig, task: Task, tier: str) -> _Failure | tuple[str, ...]:
    """Return why the type does not reach `tier`, or the modules whose linear layers training does not call."""
    labels = TaskConfig(kind=task.name, labels=["north", "east", "south"] if task.pooled else [])
    base = BaseModel(config, task_of(labels))
    sections = ModelSections(
        model=config,
        task=labels,
        adapter=AdapterConfig(kind="lora", r=4, alpha=8.0, targets=["all-linear"]),
        quantization=QuantizationConfig(kind="none"),
        attention=_MODES[tier],
        precision="fp32",
        recompute=False,
    )
    loss = IMPLEMENTATIONS[task.name].loss(labels, PreferenceConfig(kind="none"))
    try:
        model = build_training_model(sections, loss, torch.device("cpu"), seed=0, base_path="base").train()
        _change_all(model)
        batch = _batch(task, base.is_bidirectional, packed=tier == PACKED)
        check_head(model, batch)
        check_causal(model, batch)
        check_packing(model, batch)
        with _linear_calls(model.language_model) as calls:
            model(batch)[0].backward()
        difference = _difference(model, batch)
    except AppError as refusal:
        words = str(refusal)
        inside = words.partition("is not supported (")[2].partition("). Choose")[0]
        if refusal.__cause__ is not None and not inside:  # raised by the code of the type
            return _failed(refusal.__cause__)
        return _Failure(inside or _short(words), of_numbers=not inside)
    except Exception as fault:  # noqa: BLE001  from the code of any type
        return _failed(fault)
    if difference <= _ALLOWED:
        return _uncalled(calls)
    return _Failure("weight gradients differ", of_numbers=True)


def _failed(fault: BaseException) -> _Failure:
    return _Failure(f"a tiny model fails: {_in_words(fault)}", of_numbers=True, of_code=True)


@contextlib.contextmanager
def _linear_calls(lm: Any) -> Iterator[Counter[str]]:
    """Count the calls of the backbone's linear layers, by name with * for numbers."""
    calls = Counter[str]()
    handles = []
    for name, module in lm.named_modules():
        if is_linear(module) and in_backbone(lm, name) and ".lora_" not in name:
            counted = without_numbers(name.removesuffix(".base_layer"))
            calls[counted] += 0
            handles.append(module.register_forward_hook(lambda *_, counted=counted: calls.update([counted])))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _uncalled(calls: Counter[str]) -> tuple[str, ...]:
    """Return the linear layers that were not called, or their module if it has several and none was called."""
    names = set()
    for name in (name for name, count in calls.items() if not count):
        parts = name.split(".")
        for outer in (".".join(parts[:size]) for size in range(1, len(parts) + 1)):
            inside = [count for layer, count in calls.items() if f"{layer}.".startswith(f"{outer}.")]
            if not any(inside) and (len(inside) > 1 or outer == name):
                names.add(outer)
                break
    return tuple(sorted(names))


def _in_words(fault: BaseException) -> str:
    return f"{type(fault).__name__}, {gist(fault)[:120]}"


def _short(words: str) -> str:
    """Return the cause in the message of a check, without numbers."""
    cause = re.sub(r" \(relative difference [^)]*\)", "", words.partition(": ")[2].partition(", so ")[0])
    return re.sub(r"^(in this|an?) model of kind \S+ ", lambda match: "" if match[1] == "in this" else "it ", cause)


def _change_all(model: TrainingModel) -> None:
    """Randomize all parameters, so that errors show although biases, norms and adapters start at 0 and 1; train all."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
            parameter.requires_grad_(True)


def _batch(task: Task, bidirectional: bool, *, packed: bool) -> Batch:
    random = np.random.default_rng(0)
    documents = [random.integers(3, 90, n).astype(np.int32) for n in _LENGTHS]
    labeled = [_labeled(task, ids, number, bidirectional) for number, ids in enumerate(documents)]
    if packed:
        return collate_packed(labeled, 0, BinShape(sum(_LENGTHS) + 8, max(_LENGTHS), len(_LENGTHS) + 1))
    return collate_padded(labeled, 0, isolate=bidirectional)


def _labeled(task: Task, ids: Any, number: int, bidirectional: bool) -> LabeledTokens:
    if task.pooled:
        at = 0 if bidirectional else len(ids) - 1
        return LabeledTokens(ids, np.array([at]), np.array([number % 3]))
    if task.name == "masked":
        places = np.arange(0, len(ids), 3)
        return LabeledTokens(ids, places, ids[places][::-1].copy())
    return label_next_tokens(ids, np.arange(len(ids)) > 0)


def _difference(model: TrainingModel, batch: Batch) -> float:
    """Return the difference of all gradients from those of separate documents; 1 if a weight has none."""
    gradients = _gradients(model)
    lm: Any = model.language_model
    lm.set_attn_implementation("eager")
    labels = list(zip(batch.label_rows.tolist(), batch.targets.tolist(), strict=True))
    for start, length in zip(batch.starts, batch.lengths, strict=False):
        here = [(row - start, target) for row, target in labels if start <= row < start + length and target >= 0]
        if here:
            _loss_alone(model, batch.ids.flatten()[start : start + length], here).backward()
    expected = _gradients(model)
    if any(expected[name].any() and not gradients[name].any() for name in expected):
        return 1.0
    difference = sum(float((gradients[name] - expected[name]).double().square().sum()) for name in expected)
    size = sum(float(gradient.double().square().sum()) for gradient in expected.values())
    return float((difference / size) ** 0.5)


def _loss_alone(model: TrainingModel, ids: Tensor, labels: Sequence[tuple[int, int]]) -> Tensor:
    logits = model.language_model(input_ids=ids[None], use_cache=False).logits[0]
    targets = torch.tensor([target for _, target in labels])
    return F.cross_entropy(logits[None] if model.pooled else logits[[at for at, _ in labels]], targets, reduction="sum")


def _gradients(model: TrainingModel) -> dict[str, Tensor]:
    """Return copies of the gradients, and zero them."""
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return gradients


def table(sections: Sequence[str] = SECTIONS, say: Any = print) -> dict[str, dict[str, Tier]]:
    """Return the tier of every model type, by task."""
    tiers: dict[str, dict[str, Tier]] = {}
    for section in sections:
        for kind in kinds_of(section):
            start = time.perf_counter()
            tier = tiers.setdefault(section, {})[kind] = tier_in(section, kind)
            say(f"{section} {kind} {tier.name} {tier.reason} ({time.perf_counter() - start:.1f} s)", flush=True)
    return tiers


def tier_in(section: str, kind: str) -> Tier:
    """Return the tier of a model type in a section: given in tiny_kinds.yaml, or tested."""
    task = TASKS["causal" if section == WHOLES else section]
    reason = tables()["reasons"].get(kind) if task.writes_text else None
    return proven_tier(task, kind) if reason is None else Tier(REFUSED, reason)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings inside the context; they mean nothing for tiny models."""
    level = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level)
            logging.disable(logging.NOTSET)


def write(tiers: dict[str, dict[str, Tier]]) -> None:
    """Write the table; tasks that were not tested keep their entries."""
    model_kinds.cache_clear()  # another process may have written it
    tasks = {**model_kinds().tasks, **tiers}
    entries = {
        task: {kind: _entry(tasks[task][kind]) for kind in sorted(tasks[task])} for task in SECTIONS if task in tasks
    }
    lines = [f"  {json.dumps(task)}: {{\n{_lines(kinds)}\n  }}" for task, kinds in entries.items()]
    text = f'{{"transformers": "{transformers.__version__}", "tasks": {{\n' + ",\n".join(lines) + "\n}}\n"
    TABLE.write_text(text, encoding="utf-8")


def _lines(kinds: dict[str, dict[str, Any]]) -> str:
    return ",\n".join(f"    {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in kinds.items())


def _entry(tier: Tier) -> dict[str, Any]:
    default = asdict(Tier(tier.name))
    return {key: value for key, value in asdict(tier).items() if key == "name" or value != default[key]}


PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
_MARKS = ("<!-- made by python -m scripts.make_kinds -->", "<!-- end of kinds -->")


def page() -> str:
    """Return the models page with the table of the program between its marks."""
    begin, end = _MARKS
    before, _, rest = PAGE.read_text("utf-8").partition(begin)
    return "\n".join([f"{before}{begin}\n", *_kinds_as_text(), f"\n{end}{rest.partition(end)[2]}"])


def _kinds_as_text() -> Iterator[str]:
    counts = model_kinds().facts("causal")["by_task"]
    yield f"Model types of transformers {model_kinds().transformers}:\n"
    yield "| task | model types | supported | packed | padded | padded, own attention |"
    yield f"|{'---|' * 6}"
    for section, count in counts.items():
        numbers = (count[name] for name in ("total", "accepted", PACKED, PADDED, OWN))
        yield f"| {section} | {' | '.join(map(str, numbers))} |"
    for section, tiers in model_kinds().tasks.items():
        packed = [kind for kind, tier in tiers.items() if tier.name == PACKED]
        yield f"\n**{section}, packed**\n"
        yield textwrap.fill(", ".join(packed) or "none", 116, break_on_hyphens=False)
        by_reason: dict[tuple[str, str], list[str]] = {}
        for kind, tier in tiers.items():
            if tier.name != PACKED:
                by_reason.setdefault((tier.name, tier.reason.replace("|", "/")), []).append(kind)
        yield f"\n**{section}, others**\n\n| layout | reason | model types |\n|---|---|---|"
        for (name, reason), kinds in sorted(by_reason.items()):
            yield f"| {_LAYOUTS[name]} | {reason} | {', '.join(kinds)} |"


_LAYOUTS = {PADDED: "padded", OWN: "padded, own attention", REFUSED: "not supported"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] != ["page"]:
        with quiet():
            write(table(sys.argv[1:] or SECTIONS))
        model_kinds.cache_clear()
    PAGE.write_text(page(), encoding="utf-8")
