"""What single keys cannot say: combinations that cannot work, and what this version does not do yet.

Each rule is a pure function from the run to its problems; all of them are reported together.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from app.config.mixes import key_of, mix_problems, sources_of
from app.config.schema import DatasetConfig, RunConfig
from app.config.values import shown

Rule = Callable[[RunConfig], Iterator[str]]

_LIST_PATH = re.compile(r"[^*]+\.\*(\.[^*]+)?")

# rendered by a chat template
CHAT_FORMATS = ("messages", "sharegpt", "instruction", "question_answer", "chat_completion")

LABELLED_FORMATS = ("labelled_text", "text_pair")  # a text or two, and the class that they are of

# what `dataset.train_on` can mean for rows of each format
TRAIN_ON = {
    **dict.fromkeys(CHAT_FORMATS, ("auto", "assistant", "last", "all")),
    "chat_completion": ("auto", "completion", "assistant", "last", "all"),
    "prompt_completion": ("auto", "completion", "all"),
    "text": ("auto", "all"),
    **dict.fromkeys(LABELLED_FORMATS, ("auto",)),
    "auto": ("auto", "assistant", "last", "completion", "all"),  # asked again once the rows are known
}


def trains_answers(dataset: DatasetConfig) -> bool:
    """Whether what is trained of a row answers what stands before it; else it is the whole row."""
    formats = {source.format for source in sources_of(dataset).values()}
    return not formats <= {"text", *LABELLED_FORMATS} and dataset.train_on != "all"


def formats_for(task: str) -> tuple[str, ...]:
    """Those whose rows a task can learn from; `dataset.format=auto` looks for no other."""
    of_labels = task == "classification"
    return tuple(fmt for fmt in TRAIN_ON if fmt != "auto" and (fmt in LABELLED_FORMATS) is of_labels)


def has_chats(dataset: DatasetConfig) -> bool:
    """Whether a chat template writes any of the rows, held-out ones of a file of their own among them."""
    formats = {source.format for source in sources_of(dataset).values()}
    own = {dataset.format} if dataset.eval_path is not None else set()
    return not formats.isdisjoint(CHAT_FORMATS) or not own.isdisjoint(CHAT_FORMATS)


def problems_of(run: RunConfig) -> list[str]:
    """Every broken rule, in the order of RULES."""
    return [problem for rule in RULES for problem in rule(run)]


def _rows_fit_the_model(run: RunConfig) -> Iterator[str]:
    positions = run.model.architecture.get("max_position_embeddings")
    if run.model.weights == "random" and positions and run.dataset.max_length > positions:
        yield (
            f"dataset.max_length={run.dataset.max_length} is more than the {positions} positions of the model. "
            f"Set dataset.max_length={positions} or less."
        )


def _rows_fit_their_bins(run: RunConfig) -> Iterator[str]:
    if run.batching.packing and run.dataset.max_length > run.batching.tokens:
        yield (
            f"dataset.max_length={run.dataset.max_length} is more than a bin holds (batching.tokens="
            f"{run.batching.tokens}). Set batching.tokens={run.dataset.max_length} or more, or "
            f"dataset.max_length={run.batching.tokens} or less."
        )


def _trained_part_fits_the_format(run: RunConfig) -> Iterator[str]:
    for name, source in sources_of(run.dataset).items():
        allowed = TRAIN_ON.get(source.format, (source.train_on,))
        if source.train_on not in allowed:
            yield (
                f"dataset.train_on={source.train_on} means nothing for {key_of(name)}.format={source.format}. "
                f"Choose {' or '.join(allowed)}."
            )


def _hidden_tokens_are_of_text(run: RunConfig) -> Iterator[str]:
    if run.task.kind != "masked":
        return
    for name, source in sources_of(run.dataset).items():
        if source.format in ("text", "auto"):
            continue
        yield (
            f"{key_of(name)}.format={source.format}: task=masked finds hidden tokens of plain text. "
            "Set dataset=text dataset.path=FILE, or task=causal."
        )
    if run.task.mask_share <= 0:
        yield f"task.mask_share={run.task.mask_share:g} hides nothing. Set task.mask_share=0.15."


def _labels_are_of_classes(run: RunConfig) -> Iterator[str]:
    is_of_labels = run.task.kind == "classification"
    for name, source in sources_of(run.dataset).items():
        given = f"{key_of(name)}.format={source.format}"
        if is_of_labels and source.format not in (*LABELLED_FORMATS, "auto"):
            yield (
                f"{given}: task=classification learns labels, and such rows have none. Set dataset=labelled_text or "
                "dataset=text_pair with dataset.path=FILE, or task=causal."
            )
        elif run.task.kind == "causal" and source.format in LABELLED_FORMATS:
            yield (
                f"{given}: its labels are learnt by task=classification alone, and this is task=causal. "
                "Set task=classification, or dataset=text for the text without its labels."
            )


def _labels_are_classes(run: RunConfig) -> Iterator[str]:
    labels = run.task.labels
    if labels and run.task.kind != "classification":
        yield (
            f"task.labels={shown(labels)} means nothing for task={run.task.kind}. "
            "Set task=classification, or leave it out."
        )
    elif len(labels) == 1:
        yield f"task.labels={shown(labels)}: there is nothing to choose. Give two or more, or none: those of the rows."
    elif len(set(labels)) < len(labels):
        twice = sorted({label for label in labels if labels.count(label) > 1})
        yield f"task.labels={shown(labels)} names {', '.join(twice)} more than once. Give each label once."


def _one_list_makes_rows(run: RunConfig) -> Iterator[str]:
    shared = _starred(run.dataset, "dataset")
    yield from _star_problems(shared)
    for name, section in sources_of(run.dataset).items():
        own = _starred(section, key_of(name))
        if list(own.values()) != list(shared.values()):
            yield from _star_problems(own)


def _starred(section: DatasetConfig, key: str) -> dict[str, str]:
    columns = asdict(section.columns).items()
    return {f"{key}.columns.{name}": path for name, path in columns if path and "*" in path}


def _star_problems(starred: dict[str, str]) -> Iterator[str]:
    for key, path in starred.items():
        if not _LIST_PATH.fullmatch(path):
            yield f"{key}={path}: a * stands for each element of a list, as in instances.*.output."
    if len({path.partition(".*")[0] for path in starred.values()}) > 1:
        given = " ".join(f"{key}={path}" for key, path in starred.items())
        yield f"{given}: the elements of one list make the rows. Let every * stand behind the same column."


def _only_text_splits(run: RunConfig) -> Iterator[str]:
    for name, source in sources_of(run.dataset).items():
        if source.on_overflow == "split" and source.format not in ("text", "auto"):
            yield (
                f"dataset.on_overflow=split would tear a row of {key_of(name)}.format={source.format} apart. "
                "Choose drop, truncate or error."
            )


def _a_mix_is_whole(run: RunConfig) -> Iterator[str]:
    yield from mix_problems(run.dataset, tuple(TRAIN_ON))


def _one_source_of_eval_rows(run: RunConfig) -> Iterator[str]:
    given = [
        f"dataset.{name}={getattr(run.dataset, name)}"
        for name in ("eval_path", "eval_split", "eval_fraction")
        if getattr(run.dataset, name)
    ]
    if len(given) > 1:
        yield f"{' and '.join(given)} both choose the held-out rows. Keep one; set the other to null or 0."


def _best_needs_eval_rows(run: RunConfig) -> Iterator[str]:
    wants = [
        text
        for text, wanted in (
            ("checkpoint.final=best", run.checkpoint.final == "best"),
            (f"eval.patience={run.eval.patience}", run.eval.patience > 0),
        )
        if wanted
    ]
    if not wants:
        return
    if not (run.dataset.eval_path or run.dataset.eval_split or run.dataset.eval_fraction):
        yield f"{' and '.join(wants)} needs held-out rows. Set dataset.eval_path=FILE or dataset.eval_fraction=0.02."
    elif run.eval.every == 0:
        yield f"{' and '.join(wants)} needs evaluations during the run. Set eval.every=100."


def _adapter_is_whole(run: RunConfig) -> Iterator[str]:
    if run.adapter.kind == "none":
        return
    if run.adapter.r < 1:
        yield f"adapter.r={run.adapter.r} must be at least 1 for adapter.kind={run.adapter.kind}."
    if run.adapter.alpha <= 0:
        yield f"adapter.alpha={run.adapter.alpha:g} must be above 0 for adapter.kind={run.adapter.kind}."
    if not run.adapter.targets:
        yield "adapter.targets is empty. Set adapter.targets=[all-linear] or names of layers."


def _quantized_base_needs_an_adapter(run: RunConfig) -> Iterator[str]:
    if run.quantization.kind != "none" and run.adapter.kind == "none":
        yield (
            f"quantization.kind={run.quantization.kind} needs adapter.kind=lora: four bits cannot be trained. "
            "Choose recipe=qlora or set quantization=none."
        )


def _random_weights_need_numbers(run: RunConfig) -> Iterator[str]:
    if run.model.weights == "random" and "model_type" not in run.model.architecture:
        yield "model.weights=random needs model.architecture with model_type and the numbers of config.json."


def _random_weights_read_no_folder(run: RunConfig) -> Iterator[str]:
    if run.model.weights == "random" and Path(run.model.path).expanduser().is_dir():
        yield (
            f"model.path={run.model.path} would not be read, because model.weights=random. "
            "Choose model=folder, or the model=NAME that it is like with model.weights=pretrained."
        )


def _resume_needs_its_folder(run: RunConfig) -> Iterator[str]:
    if run.resume in (None, "auto"):
        return
    path = Path(run.resume).expanduser()
    if not path.is_dir():
        yield (
            f"resume={run.resume}: there is no such folder. "
            "Give resume=auto or a folder like RUN/checkpoints/step-000100."
        )


RULES: tuple[Rule, ...] = (
    _rows_fit_the_model,
    _rows_fit_their_bins,
    _trained_part_fits_the_format,
    _hidden_tokens_are_of_text,
    _labels_are_of_classes,
    _labels_are_classes,
    _one_list_makes_rows,
    _only_text_splits,
    _a_mix_is_whole,
    _one_source_of_eval_rows,
    _best_needs_eval_rows,
    _adapter_is_whole,
    _quantized_base_needs_an_adapter,
    _random_weights_need_numbers,
    _random_weights_read_no_folder,
    _resume_needs_its_folder,
)
