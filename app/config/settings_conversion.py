"""Conversion of a config of another program, with the result for each setting."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from app.config.adapters import METHODS
from app.config.conf_files import as_number, choices_by_group, literal
from app.config.converted_settings import ADAPTER_RECIPES, PROGRAMS, UNSET, Conversion, program_of
from app.config.kinds import PREFERENCE_KINDS, recipes_of
from app.config.load import compose_run
from app.config.other_programs import translate
from app.config.overrides import WARMUPS, as_override, flat
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.config.validate import format_value, setting_of
from app.errors import ConfigError, refuse

_ROWS = "dataset.path=rows.jsonl"  # placeholder for a path missing in the file


def converted(data: Mapping[str, Any], folder: Path | None = None) -> Conversion:
    """Convert the settings of a file in a folder; settings that a run rejects are left out."""
    settings = dict(flat("", data))
    program = program_of({*settings, *data})
    if program is None:
        labels = ", ".join(facts["label"] for facts in PROGRAMS.values())
        raise ConfigError(f"The file is not a config of {labels}: it has none of their settings.")
    conversion = Conversion(program=program, settings=settings, folder=folder or Path())
    for name, value in settings.items():
        translate(conversion, name, value)
    _repeat_rows(conversion)
    refuse(_unsupported_objectives(conversion))
    _infer_preference(conversion)
    _choose_recipe(conversion)
    defaults = _defaults(conversion)
    conversion.words |= defaults
    _count_rows(conversion)
    run = _leave_out_refused(conversion)
    _add_replacements(conversion, run)
    left = " ".join(f"{key}={format_value(value)}" for key, value in defaults.items() if key in conversion.words)
    if left:
        conversion.changed.append(f"{conversion.facts['label']} defaults made explicit: {left}")
    missing = conversion.facts.get("missing", {})
    conversion.changed += [note for name, note in missing.items() if name not in settings]
    if (
        "remark" in conversion.facts
        and "dataset.train_on" not in conversion.words
        and conversion.words["recipe"] in ADAPTER_RECIPES
    ):
        conversion.changed.append(conversion.facts["remark"])
    return conversion


def report_lines(conversion: Conversion) -> Iterator[str]:
    """Yield the result for each setting, and their numbers."""
    groups = {
        "converted": conversion.converted,
        "not needed": conversion.not_needed,
        "not converted": conversion.not_converted,
    }
    settings = conversion.settings
    for label, group in groups.items():
        for name, text in group.items():
            value = f": {format_value(settings[name])}" if name in settings and label == "converted" else ""
            yield f"{label:<13} {name}{value}{' -> ' if label == 'converted' else '  '}{text}"
    for text in conversion.changed:
        yield f"{'changed':<13} {text}"
    yield (
        f"{conversion.facts['label']}: {len(conversion.converted)} settings converted, "
        f"{len(conversion.not_needed)} not needed, {len(conversion.not_converted)} not converted"
    )


def _unsupported_objectives(conversion: Conversion) -> Iterator[str]:
    """Yield a problem for each setting that selects the training objective and cannot be converted."""
    patterns = conversion.facts.get("objective", "").split()
    losses = ", ".join(kind for kind in PREFERENCE_KINDS if kind != "none")
    for name, value in conversion.settings.items():
        is_not_converted = name in conversion.not_converted and any(fnmatch(name, pattern) for pattern in patterns)
        if is_not_converted or (
            name not in conversion.converted and any(fnmatch(f"{name}={value}", pattern) for pattern in patterns)
        ):
            yield (
                f"{name}: {format_value(value)}: this training objective is not supported. Supported: supervised "
                f"fine-tuning and the preference losses {losses}. Change or remove {name} to convert the rest."
            )


def _repeat_rows(conversion: Conversion) -> None:
    """Let `max_steps` set the length of the run: transformers repeats the rows until then and ignores the epochs."""
    steps = as_number(conversion.words.get("training.max_steps"))
    if steps is None or conversion.facts.get("epochs_count"):
        return
    for name in [name for name in conversion.converted if "training.epochs" in _keys_of(conversion, name)]:
        del conversion.converted[name]
        conversion.not_needed[name] = "set by max_steps"
    conversion.words["training.epochs"] = steps
    conversion.changed.append(
        f"max_steps: {steps:g}: rows are repeated until this step, so training.epochs={steps:g} ends no run earlier"
    )


def _infer_preference(conversion: Conversion) -> None:
    """Choose the recipe of a file with settings of a preference loss that does not name the loss."""
    recipes = conversion.facts.get("implies", {})
    name = conversion.has(*recipes)
    if name and not {"recipe", "task.loss"} & {*conversion.words}:
        losses = recipes_of("preference") + recipes_of("preference_label")
        conversion.words["recipe"] = recipes[name]
        conversion.changed.append(
            f"{name}: {format_value(conversion.settings[name])}: preference loss without a name, "
            f"converted as recipe={recipes[name]}. Type {' or '.join(losses)} after from= to change it"
        )


def _choose_recipe(conversion: Conversion) -> None:
    """Set recipe=full, lora or qlora; a preference recipe keeps its name, with the adapter and quantization."""
    facts, settings = conversion.facts, conversion.settings
    names, *without = facts["adapter"]
    name = conversion.has(*names.split("|")) or names.partition("|")[0]
    adapter = settings.get(name)
    bits = {key: settings[key] for key in facts["four_bits"] if key in settings and key != name}
    if conversion.program == "torchtune":
        is_adapted = "lora" in str(adapter)
    else:
        is_adapted = facts["default"] == "lora" if adapter in UNSET else adapter not in without
    four = "qlora" in str(adapter) or any(value in (True, 4) for value in bits.values() or [facts.get("packs")])
    recipe = ("qlora" if four else "lora") if is_adapted else "full"
    recipe_words = {"recipe": recipe}
    if "recipe" in conversion.words:
        recipe_words = {"recipe": conversion.words["recipe"]}
        if recipe == "qlora":
            recipe_words["quantization"] = conversion.words.get("quantization", "nf4")
        elif recipe == "full":
            recipe_words["adapter"] = "none"
    if str(adapter).upper() in METHODS:
        recipe_words |= {"adapter": "peft", "adapter__method": str(adapter).upper()}
    label = name if name in settings else f"{name} (not set)"
    conversion.convert(label, **recipe_words)
    if adapter == "freeze":
        conversion.changed.append(f"{name}: freeze: all layers are trained; training.freeze=[NAMES] freezes weights")
    if recipe == "full":
        _leave_out_adapter(conversion)
    _record_bits(conversion, bits, conversion.converted[label], is_adapted=is_adapted)


def _record_bits(conversion: Conversion, bits: Mapping[str, Any], recipe: str, *, is_adapted: bool) -> None:
    """Record the conversion of the base quantization, which is part of the recipe."""
    for name, value in bits.items():
        if value in UNSET:
            conversion.not_needed[name] = "off"
        elif value == 8 and is_adapted:
            conversion.convert(name, quantization="llm_int8")
        elif value in (True, 4) and is_adapted:
            conversion.converted[name] = recipe
        else:
            why = "a base has 4, 8 or 16 bits" if is_adapted else "the file trains no adapter"
            conversion.not_converted[name] = f"{format_value(value)}: {why}"


def _leave_out_adapter(conversion: Conversion) -> None:
    keys = [key for key in conversion.words if key.startswith("adapter.")]
    for key in keys:
        del conversion.words[key]
    for name in [name for name in conversion.converted if {*_keys_of(conversion, name)} & {*keys}]:
        del conversion.converted[name]
        conversion.not_needed[name] = "the file trains no adapter"


def _keys_of(conversion: Conversion, name: str) -> list[str]:
    return [word.partition("=")[0] for word in conversion.converted[name].split()]


def _defaults(conversion: Conversion) -> dict[str, Any]:
    """Return the defaults of the other program that differ from those of this one."""
    words = conversion.words
    has = {
        "adapter.": words["recipe"] != "full" and words.get("adapter", "lora") == "lora",
        "optimizer.lr": words["recipe"] in ADAPTER_RECIPES or conversion.program != "trl",  # TRL: one per loss
        "preference.": words["recipe"] == "simpo",
        "schedule.warmup": not {*WARMUPS} & {*words},
        "dataset.max_length": "max_length" not in conversion.not_converted,
        "dataset.eval_fraction": not {"dataset.eval_path", "dataset.eval_split"} & {*words},
    }
    facts, rows = conversion.facts, as_number(conversion.settings.get(conversion.facts["rows"])) or 1
    computed = {"2r": 2 * (as_number(words.get("adapter.r")) or 8), "16/rows": max(1, round(16 / rows))}
    values = facts.get("defaults", {}) | (facts.get("defaults_full", {}) if words["recipe"] == "full" else {})
    defaults = {
        key: computed.get(value, value)
        for key, value in values.items()
        if key not in words and all(is_read for prefix, is_read in has.items() if key.startswith(prefix))
    }
    if {**defaults, **words}.get("schedule", "cosine") == "cosine" and "schedule.final_fraction" not in words:
        defaults["schedule.final_fraction"] = 0.0
    if {"dataset.eval_path", "dataset.eval_split"} & {*words} and "dataset.eval_fraction" not in words:
        defaults["dataset.eval_fraction"] = 0.0
    return defaults


def _count_rows(conversion: Conversion) -> None:
    """Convert the rows per micro-batch to padded rows or the tokens of a bin."""
    name = conversion.facts["rows"]
    rows = conversion.settings.get(name)
    length = conversion.words.get("dataset.max_length")
    if rows in UNSET:
        if name in conversion.settings:
            conversion.not_needed[name] = "not set"
    elif type(rows) is not int:
        conversion.not_converted[name] = (
            f"{format_value(rows)}: not a whole number. batching.tokens=auto uses as many tokens as fit"
        )
    elif conversion.words.get("batching.packing") is False:
        conversion.convert(name, **{"batching.rows": rows})
    elif isinstance(length, int):
        kind = PREFERENCE_KINDS.get(conversion.words["recipe"])  # recipes are named after the losses
        answers = TASKS[kind.task].documents if kind else 1
        tokens = answers * rows * length
        conversion.convert(name, **{"batching.tokens": tokens})
        conversion.changed.append(
            f"{name}: {rows}: rows are packed, so a micro-batch is a bin of {rows} x {length} "
            f"{f'x {answers} answers ' if answers > 1 else ''}= {tokens} tokens with more than {rows} rows; "
            f"batching.packing=false batching.rows={rows} pads rows as before"
        )
    else:
        conversion.not_converted[name] = f"no length in the file: set batching.tokens to {rows} x dataset.max_length"


def _leave_out_refused(conversion: Conversion) -> RunConfig:
    """Remove settings that a run rejects, with the reason, until it is valid; return the run."""
    while True:
        rows = (
            []
            if {"dataset.path", "dataset"} <= {*conversion.words} or conversion.words.get("dataset") == "mix"
            else [_ROWS]
        )
        has_no_rows = bool(rows)
        rows = rows if "dataset" in conversion.words else [f"dataset=auto {word}" for word in rows]
        try:
            words = [f"{key}={as_override(literal(value))}" for key, value in conversion.words.items()]
            run = compose_run([*" ".join(rows).split(), *words])
        except ConfigError as refusal:
            # a problem starts with the key to change, which may be a default: then with a key of the file in it
            rejected = _named_in(refusal.problems, conversion.words, str.startswith)
            rejected = rejected or _named_in(refusal.problems, conversion.words, str.__contains__)
            if not rejected:
                raise
            for key, problem in rejected.items():
                del conversion.words[key]
                for name in [name for name in conversion.converted if key in _keys_of(conversion, name)]:
                    del conversion.converted[name]
                    conversion.not_converted[name] = problem
        else:
            if has_no_rows:
                conversion.changed.append("no supported dataset in the file: add dataset=FILE next to from=")
            return run


def _named_in(problems: Sequence[str], keys: Iterable[str], has: Callable[[str, str], bool]) -> dict[str, str]:
    """Return the keys that problems name, with the problem."""
    names = [(name, key) for key in keys for name in (f"{key}=", f"{key}.kind=")]
    return {key: problem for problem in problems for name, key in names if has(problem, name)}


def _add_replacements(conversion: Conversion, run: RunConfig) -> None:
    """Add the choice that replaces an unsupported one, such as the optimizer of the recipe."""
    for name, reason in conversion.not_converted.items():
        is_group = name in choices_by_group()
        group = name if is_group else setting_of(conversion.facts["columns"], name, "").get("here", "")
        kind = getattr(getattr(run, group, None), "kind", "")
        if kind:
            conversion.not_converted[name] = f"{reason.rstrip('.')}. {group}={kind} is used"
