"""Tables of row formats, classification problems, preference losses, metrics, quantizations and model types.

Schema, rules, data, models and pages share them. `python -m scripts.make_kinds` writes `assets/model_kinds.json`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from app.assets import ROOT


@dataclass(frozen=True, slots=True)
class PreferenceKind:
    """Task, reference model and recipe of a preference loss."""

    task: str = "preference"
    has_reference: bool = True  # whether rewards are relative to the model before step 1
    has_recipe: bool = False  # whether a file of conf/recipe has its name


PREFERENCE_KINDS: Mapping[str, PreferenceKind] = {
    "none": PreferenceKind(task="", has_reference=False),
    "dpo": PreferenceKind(has_recipe=True),
    "robust": PreferenceKind(),
    "ipo": PreferenceKind(),
    "orpo": PreferenceKind(has_reference=False, has_recipe=True),
    "simpo": PreferenceKind(has_reference=False, has_recipe=True),
    "kto": PreferenceKind(task="preference_label", has_recipe=True),
}
_MAX_GOOD_WEIGHT = 4 / 3  # total weight of good answers over that of bad ones: Eq. 8 of the KTO paper


def recipes_of(task: str) -> tuple[str, ...]:
    """Return the recipes of a task's preference losses."""
    return tuple(f"recipe={name}" for name, kind in PREFERENCE_KINDS.items() if kind.task == task and kind.has_recipe)


def balance_notes(weights: Mapping[str, float], rows: Mapping[str, int]) -> Iterator[str]:
    """Yield a note if one label outweighs the other; `weights` by key, `rows` by label."""
    (good, desirable), (bad, undesirable) = zip(("true", "false"), weights.values(), strict=True)
    total, against = rows.get(good, 0) * desirable, rows.get(bad, 0) * undesirable
    if not total or not against or 1 <= total / against <= _MAX_GOOD_WEIGHT:
        return
    up, down = weights
    key, value = (up, against / rows[good]) if total < against else (down, total / rows[bad])
    yield (
        f"{rows[good]:,} good and {rows[bad]:,} bad answers: total weight ratio {total / against:.2f}, "
        f"the KTO paper recommends 1 to 1.33. Set {key}={value:.3g} for a ratio of 1"
    )


# ---- row formats


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Required (`needs`) and optional (`may`) columns, and the trained part."""

    needs: tuple[str, ...]
    may: tuple[str, ...] = ()
    content: Literal["chat", "answer", "text", "labels", "tags", "ids"] = "chat"  # a chat template renders chats
    train_on: tuple[str, ...] = ("auto", "assistant", "last", "all")  # accepted values of `dataset.train_on`
    overflow: Literal["drop", "split", "truncate"] = "drop"  # dataset.on_overflow=auto for longer samples
    message: tuple[str, ...] = ()  # keys of its messages: the role, then possible contents
    pairs: bool = False  # rows have a chosen and a rejected answer
    learnt_by: tuple[str, ...] = ()  # recipes for its preference loss, if it needs one
    any_column: bool = False  # detected under any column name

    @property
    def holds(self) -> str:
        """Content of its columns as text."""
        if self.message:
            return f"lists of objects with {self.message[0]} and {self.message[1]}"
        holds = {
            "labels": "text and its label",
            "tags": "lists of words and of their tags",
            "ids": "lists of token ids",
        }
        return holds.get(self.content, "text")


_OF_ANSWERS = ("tools", "system", "chat_template_kwargs")
_OF_CHATS = (*_OF_ANSWERS, "reasoning")
_MESSAGE = ("role", "content", "tool_calls", "function_call")
_PAIR = ("auto", "completion")
_COMPLETION = ("auto", "completion", "assistant", "last", "all")
_BY_PAIRS, _BY_LABELS = recipes_of("preference"), recipes_of("preference_label")

ROW_FORMATS: Mapping[str, RowFormat] = {
    "messages": RowFormat(("messages",), _OF_CHATS, message=_MESSAGE, any_column=True),
    "sharegpt": RowFormat(("conversations",), _OF_CHATS, message=("from", "value"), any_column=True),
    "instruction": RowFormat(("instruction", "output"), ("input", "history", *_OF_CHATS)),
    "question_answer": RowFormat(("question", "answer"), _OF_CHATS),
    "prompt_completion": RowFormat(("prompt", "completion"), content="answer", train_on=("auto", "completion", "all")),
    "chat_completion": RowFormat(("prompt", "completion"), _OF_CHATS, train_on=_COMPLETION, message=_MESSAGE),
    "text": RowFormat(("text",), content="text", train_on=("auto", "all"), overflow="split"),
    "labelled_text": RowFormat(("text", "label"), content="labels", train_on=("auto",), overflow="truncate"),
    "text_pair": RowFormat(
        ("sentence1", "sentence2", "label"), content="labels", train_on=("auto",), overflow="truncate"
    ),
    "tagged_words": RowFormat(("tokens", "tags"), content="tags", train_on=("auto",), overflow="truncate"),
    "token_ids": RowFormat(("input_ids",), ("labels", "attention_mask"), content="ids", train_on=("auto",)),
    "preference": RowFormat(
        ("chosen", "rejected"),
        ("prompt", *_OF_ANSWERS),
        train_on=_PAIR,
        message=_MESSAGE,
        pairs=True,
        learnt_by=_BY_PAIRS,
    ),
    "preference_text": RowFormat(
        ("chosen", "rejected"), ("prompt",), content="answer", train_on=_PAIR, pairs=True, learnt_by=_BY_PAIRS
    ),
    "preference_label": RowFormat(
        ("completion", "label"), ("prompt", *_OF_ANSWERS), train_on=_PAIR, message=_MESSAGE, learnt_by=_BY_LABELS
    ),
    "preference_label_text": RowFormat(
        ("completion", "label"), ("prompt",), content="answer", train_on=_PAIR, learnt_by=_BY_LABELS
    ),
}
CHAT_FORMATS = tuple(name for name, row_format in ROW_FORMATS.items() if row_format.content == "chat")
PREFERENCE_FORMATS = tuple(name for name, row_format in ROW_FORMATS.items() if row_format.learnt_by)
# for text formats: the format that renders the same answers with a chat template
CHAT_OF = {"preference_text": "preference", "preference_label_text": "preference_label"}
LABELED_FORMATS = tuple(name for name, row_format in ROW_FORMATS.items() if row_format.content == "labels")
TAGGED_FORMATS = tuple(name for name, row_format in ROW_FORMATS.items() if row_format.content == "tags")
TOKEN_FORMATS = tuple(name for name, row_format in ROW_FORMATS.items() if row_format.content == "ids")
WITHOUT_ANSWERS = tuple(
    name for name, row_format in ROW_FORMATS.items() if row_format.content in ("text", "labels", "tags", "ids")
)


def fields_of(fmt: str) -> tuple[str, ...]:
    """Return the fields of `dataset.columns` that a format reads."""
    return (*ROW_FORMATS[fmt].needs, *ROW_FORMATS[fmt].may)


# ---- problems


THRESHOLD = 0.5  # minimum probability of a predicted label in multi-label classification


@dataclass(frozen=True, slots=True)
class Problem:
    """Interpretation of the outputs of a classification head."""

    problem_type: str  # in config.json
    values: str  # key of the outputs in files of finetune generate
    answer: Callable[[Mapping[str, float]], Any]  # from output values by name to the prediction
    least_labels: int  # minimum number of labels
    named: bool = True  # outputs are named classes, which may have loss weights


def text_of(answer: Any) -> str:
    """Format a prediction as text."""
    if isinstance(answer, Mapping):
        return ", ".join(f"{name} {value:.4g}" for name, value in answer.items())
    if isinstance(answer, list):
        return ", ".join(answer) or "none"
    return answer if isinstance(answer, str) else f"{answer:.4g}"


def _likeliest(values: Mapping[str, float]) -> str:
    return max(values, key=lambda name: values[name])


def _likely(values: Mapping[str, float]) -> list[str]:
    return [name for name, value in values.items() if value >= THRESHOLD]


def _numbers(values: Mapping[str, float]) -> float | dict[str, float]:
    return dict(values) if len(values) > 1 else next(iter(values.values()))


PROBLEMS: dict[str, Problem] = {
    "single": Problem("single_label_classification", "probabilities", _likeliest, 2),
    "multi": Problem("multi_label_classification", "probabilities", _likely, 1),
    "regression": Problem("regression", "values", _numbers, 1, named=False),
}


# ---- metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of an evaluation."""

    name: str  # in metrics.jsonl and result.json
    label: str
    format: str  # format specification
    better: Literal["lower", "higher"]
    meaning: str
    logged: bool = True  # in every evaluation of a run; others only in finetune evaluate
    in_summary: bool = False  # in the summary of a run; shares always are

    @property
    def is_share(self) -> bool:
        """Whether the value is between 0 and 1."""
        return self.format.endswith("%")

    @property
    def may_lack(self) -> bool:
        """Whether the metric may be undefined: no answers, or constant values."""
        return self.is_share or self.in_summary

    def cost(self, value: float) -> float:
        """Return the value with a sign such that lower is better; cost(cost(x)) is x."""
        return value if self.better == "lower" else -value

    def text(self, value: float) -> str:
        """Format the value as text."""
        return f"{value:{self.format}}"


_ALL = (
    Metric("eval_loss", "loss", ".4f", "lower", "mean over trained tokens, or over answers or pairs of them"),
    Metric("perplexity", "perplexity", ".4g", "lower", "exp of the loss", logged=False),
    Metric("token_accuracy", "token accuracy", ".2%", "higher", "share of the trained tokens", logged=False),
    Metric("exact_match", "exact match", ".2%", "higher", "share of the held-out answers"),
    Metric("accuracy", "accuracy", ".2%", "higher", "share of the held-out answers, or of their words"),
    Metric("pair_accuracy", "pair accuracy", ".2%", "higher", "fraction of pairs whose chosen answer is preferred"),
    Metric("reward_margin", "reward margin", ".3f", "higher", "reward of the chosen minus the rejected answer"),
    Metric("chosen_reward", "chosen reward", ".3f", "higher", "mean of the answers"),
    Metric("rejected_reward", "rejected reward", ".3f", "lower", "mean of the answers"),
    Metric("chosen_log_probability", "chosen answers", ".3f", "higher", "mean log-probability per token"),
    Metric("rejected_log_probability", "rejected answers", ".3f", "lower", "mean log-probability per token"),
    Metric("macro_f1", "macro F1", ".2%", "higher", "mean of the labels"),
    Metric("micro_f1", "micro F1", ".2%", "higher", "of all labels of all rows together"),
    Metric("entity_f1", "entity F1", ".2%", "higher", "of all entities of tagged words, by seqeval's rule"),
    Metric("mae", "mean absolute error", ".4g", "lower", "mean over the numbers of the held-out rows", in_summary=True),
    Metric("pearson", "Pearson", ".4f", "higher", "correlation of true and predicted numbers", in_summary=True),
    Metric("spearman", "Spearman", ".4f", "higher", "correlation of their ranks", in_summary=True),
)


def cost_of(objective: float, name: str | None) -> float:
    """Return an objective with a sign such that lower is better; without a name it is a loss."""
    return objective if name is None else METRICS[name].cost(objective)


METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}
LOGGED = tuple(metric.name for metric in _ALL if metric.logged)
SUMMARY_METRICS = tuple(metric for metric in _ALL if metric.logged and metric.may_lack)


# ---- quantizations


class QuantizationKind(NamedTuple):
    """Properties of a quantization; its code is in `app/layers`."""

    tuning: str  # name of tuning on such a base, with {} for the adapter
    smaller: tuple[str, str]  # setting that saves more memory, and how
    rounds_to: str = ""  # number format, if the adapter compensates for the rounding
    needs_fp8: bool = False  # GPU with fp8
    trains: bool = False  # weights are rounded on use and trained; otherwise they are stored quantized and frozen
    uncompilable: str = ""  # reason why its layers cannot be compiled
    mixes_rows: bool = False  # whether the output of a row depends on the others
    # weights per byte of scales, unquantized and quantized; the latter are dequantized on each use
    weights_per_scale_byte: tuple[float, float] = (0.0, 0.0)


_FOUR_BITS = QuantizationKind(
    "Q{}",
    ("quantization.double_quant=true", "8-bit scales of the 4-bit weights"),
    rounds_to="four bits",
    weights_per_scale_byte=(16.0, 63.0),  # one scale per 64 weights, of 32 bits or of 8
)
QUANTIZATION_KINDS = {
    "none": QuantizationKind("{}", ("recipe=qlora", "4 bits per weight of the frozen base, dequantized on use")),
    "nf4": _FOUR_BITS,
    "fp4": _FOUR_BITS,
    "int8": QuantizationKind("{} on an int8 base", ("quantization=nf4", "4 instead of 8 bits per weight")),
    "llm_int8": QuantizationKind(
        "{} on an LLM.int8() base",
        ("quantization=nf4", "4 instead of 8 bits per weight"),
        uncompilable="the number of outlier columns differs in each layer and step",
        mixes_rows=True,
    ),
    "fp8": QuantizationKind(
        "{} on an fp8 base",
        ("quantization=nf4", "4 instead of 2 x 8 bits per weight, dequantized on use"),
        needs_fp8=True,
    ),
    **dict.fromkeys(
        ("int4", "mxfp4", "nvfp4"),
        QuantizationKind("Q{}", ("quantization=nf4", "8-bit scales of the 4-bit weights"), rounds_to="four bits"),
    ),
    "qat": QuantizationKind(
        "{}, quantization-aware", ("quantization=none", "weights are not rounded in the forward pass"), trains=True
    ),
}


# ---- model kinds


# from best to worst: packed documents; one document per row; the same with the model's own attention; not supported
TIERS = PACKED, PADDED, OWN, REFUSED = "packed", "padded", "own", "refused"


@dataclass(frozen=True, slots=True)
class Tier:
    """How models of a type are trained, and why not packed."""

    name: str
    reason: str = ""
    layers: tuple[str, ...] = ()  # layer types of the tiny model, in addition to the common ones
    compared: bool = True  # whether results were compared; otherwise each model is checked again
    text_of: str | None = None  # for a multimodal type: type of the text part, which is trained
    uncalled: tuple[str, ...] = ()  # modules whose linear layers are not called in training, with * for layer numbers

    @property
    def accepted(self) -> bool:
        return self.name != REFUSED


@dataclass(frozen=True, slots=True)
class ModelKinds:
    """Support table by task and model_type."""

    transformers: str  # version that built the models
    tasks: dict[str, dict[str, Tier]]

    def facts(self, task: str) -> dict[str, Any]:
        """Return the table for check.json; `total` and `accepted` count one task."""
        counted = {name: _counts(tiers.values()) for name, tiers in self.tasks.items()}
        return {
            "transformers": self.transformers,
            "total": counted[task]["total"],
            "accepted": counted[task]["accepted"],
            "kinds": [
                {"kind": kind, "task": name, "tier": tier.name, "reason": tier.reason, "text_of": tier.text_of}
                for name, tiers in self.tasks.items()
                for kind, tier in tiers.items()
            ],
            "by_task": counted,
        }


def _counts(tiers: Collection[Tier]) -> dict[str, int]:
    by_name = {name: sum(tier.name == name for tier in tiers) for name in TIERS}
    return {"total": len(tiers), "accepted": sum(tier.accepted for tier in tiers), **by_name}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def without_numbers(name: str) -> str:
    """Return the name of a module with * for the numbers of repeated layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def uncalled_modules(kind: str) -> tuple[str, ...]:
    """Return the modules whose linear layers models of a kind do not call in training, with * for numbers."""
    return tuple(name for kinds in model_kinds().tasks.values() if kind in kinds for name in kinds[kind].uncalled)


@cache
def model_kinds() -> ModelKinds:
    """Return the included table."""
    content = json.loads((ROOT / "model_kinds.json").read_text("utf-8"))
    tasks = {
        task: {kind: Tier(**{key: _frozen(value) for key, value in entry.items()}) for kind, entry in kinds.items()}
        for task, kinds in content["tasks"].items()
    }
    return ModelKinds(content["transformers"], tasks)
