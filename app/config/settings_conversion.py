"""Settings of a file of another program in the words of this one, and what became of each."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from app.config.adapters import METHODS
from app.config.conf_files import as_number, choices_by_group, literal
from app.config.kinds import PREFERENCE_KINDS, recipes_of
from app.config.load import compose_run
from app.config.other_programs import OF_ADAPTERS, PROGRAMS, UNSET, Conversion, translate
from app.config.overrides import WARMUPS, as_override, flat, split_arguments
from app.config.schema import RunConfig
from app.config.tasks import TASKS
from app.config.validate import format_value, setting_of
from app.errors import ConfigError, refuse

_ROWS = "dataset.path=rows.jsonl"  # in place of a path that the file does not have


def converted(data: Mapping[str, Any]) -> Conversion:
    """The settings of a file in the words of this program, as far as a run accepts them."""
    settings = dict(flat("", data))
    program = next((name for name, facts in PROGRAMS.items() if {*facts["known_by"]} & {*settings, *data}), None)
    if program is None:
        labels = ", ".join(facts["label"] for facts in PROGRAMS.values())
        raise ConfigError(f"It is no file of settings of {labels}: none of their names is in it.")
    found = Conversion(program=program, settings=settings)
    for name, value in settings.items():
        translate(found, name, value)
    refuse(_lost_objectives(found))
    _infer_preference(found)
    _choose_recipe(found)
    defaults = _defaults(found)
    found.words |= defaults
    _count_rows(found)
    run = _leave_out_refused(found)
    _tell_replacements(found, run)
    left = " ".join(f"{key}={format_value(value)}" for key, value in defaults.items() if key in found.words)
    if left:
        found.changed.append(f"the file leaves these to {found.facts['label']}, so they are written out: {left}")
    if "remark" in found.facts and "dataset.train_on" not in found.words and found.words["recipe"] in OF_ADAPTERS:
        found.changed.append(found.facts["remark"])
    return found


def _lost_objectives(found: Conversion) -> Iterator[str]:
    """Yield a problem for each setting that selects the training objective and cannot be converted."""
    patterns = found.facts.get("objective", "").split()
    losses = ", ".join(kind for kind in PREFERENCE_KINDS if kind != "none")
    for name, value in found.settings.items():
        is_lost = name in found.lost and any(fnmatch(name, pattern) for pattern in patterns)
        if is_lost or (name not in found.carried and any(fnmatch(f"{name}={value}", pattern) for pattern in patterns)):
            yield (
                f"{name}: {format_value(value)}: this training objective is not supported. Supported: supervised "
                f"fine-tuning and the preference losses {losses}. Change or remove {name} to convert the rest."
            )


def _infer_preference(found: Conversion) -> None:
    """Choose the recipe of a file that has settings of a preference loss, and does not name the loss."""
    recipes = found.facts.get("implies", {})
    name = found.has(*recipes)
    if name and not {"recipe", "task.loss"} & {*found.words}:
        losses = recipes_of("preference") + recipes_of("preference_label")
        found.words["recipe"] = recipes[name]
        found.changed.append(
            f"{name}: {format_value(found.settings[name])}: the file has a preference loss and does not name it; "
            f"converted as recipe={recipes[name]}. Type {' or '.join(losses)} after from= to change it"
        )


def _choose_recipe(found: Conversion) -> None:
    """recipe=full, lora or qlora; a recipe of pairs keeps its name, with the adapter and bits of the file."""
    facts, settings = found.facts, found.settings
    name, *without = facts["adapter"]
    given = settings.get(name)
    bits = {each: settings[each] for each in facts["four_bits"] if each in settings and each != name}
    if found.program == "torchtune":
        is_adapted = "lora" in str(given)
    else:
        is_adapted = facts["default"] == "lora" if given in UNSET else given not in without
    four = "qlora" in str(given) or any(each in (True, 4) for each in bits.values() or [facts.get("packs")])
    recipe = ("qlora" if four else "lora") if is_adapted else "full"
    recipe_words = {"recipe": recipe}
    if "recipe" in found.words:
        recipe_words = {"recipe": found.words["recipe"]}
        if recipe == "qlora":
            recipe_words["quantization"] = found.words.get("quantization", "nf4")
        elif recipe == "full":
            recipe_words["adapter"] = "none"
    if str(given).upper() in METHODS:
        recipe_words |= {"adapter": "peft", "adapter__method": str(given).upper()}
    told = name if name in settings else f"{name} (not given)"
    found.carry(told, **recipe_words)
    if given == "freeze":
        found.changed.append(
            f"{name}: freeze: all layers are trained; training.freeze=[NAMES] keeps weights as they are"
        )
    if recipe == "full":
        _leave_out_adapter(found)
    _tell_bits(found, bits, found.carried[told], is_adapted=is_adapted)


def _tell_bits(found: Conversion, bits: Mapping[str, Any], recipe: str, *, is_adapted: bool) -> None:
    """What became of the bits of the base, which the words of a recipe say."""
    for each, value in bits.items():
        if value in UNSET:
            found.needless[each] = "it is off"
        elif value == 8 and is_adapted:
            found.carry(each, quantization="int8")
        elif value in (True, 4) and is_adapted:
            found.carried[each] = recipe
        else:
            why = "a base has 4 or 8 bits, or 16" if is_adapted else "the file trains no adapter"
            found.lost[each] = f"{format_value(value)}: {why}"


def _leave_out_adapter(found: Conversion) -> None:
    keys = [key for key in found.words if key.startswith("adapter.")]
    for key in keys:
        del found.words[key]
    for name in [name for name in found.carried if {*_keys_of(found, name)} & {*keys}]:
        del found.carried[name]
        found.needless[name] = "the file trains no adapter"


def _keys_of(found: Conversion, name: str) -> list[str]:
    return [word.partition("=")[0] for word in found.carried[name].split()]


def _defaults(found: Conversion) -> dict[str, Any]:
    """Words for what the file leaves to its program, where a run of it would be another one."""
    words = found.words
    has = {
        "adapter.": words["recipe"] != "full" and words.get("adapter", "lora") == "lora",
        "optimizer.lr": words["recipe"] in OF_ADAPTERS or found.program != "trl",  # which has one for each loss
        "preference.": words["recipe"] == "simpo",
        "schedule.warmup": not {*WARMUPS} & {*words},
        "dataset.max_length": "max_length" not in found.lost,
    }
    given = {
        key: 2 * (as_number(words.get("adapter.r")) or 8) if value == "2r" else value
        for key, value in found.facts.get("defaults", {}).items()
        if key not in words and all(is_read for prefix, is_read in has.items() if key.startswith(prefix))
    }
    if {**given, **words}.get("schedule", "cosine") == "cosine" and "schedule.final_fraction" not in words:
        given["schedule.final_fraction"] = 0.0
    if {"dataset.eval_path", "dataset.eval_split"} & {*words} and "dataset.eval_fraction" not in words:
        given["dataset.eval_fraction"] = 0.0
    return given


def _count_rows(found: Conversion) -> None:
    """Rows of a micro-batch: padded rows, or the tokens of a bin."""
    name = found.facts["rows"]
    rows = found.settings.get(name)
    length = found.words.get("dataset.max_length")
    if rows in UNSET:
        if name in found.settings:
            found.needless[name] = "it is not set"
    elif type(rows) is not int:
        found.lost[name] = f"{format_value(rows)}: it is no whole number. batching.tokens=auto takes as many as fit"
    elif found.words.get("batching.packing") is False:
        found.carry(name, **{"batching.rows": rows})
    elif isinstance(length, int):
        kind = PREFERENCE_KINDS.get(found.words["recipe"])  # recipes of preference losses have their names
        answers = TASKS[kind.task].documents if kind else 1
        tokens = answers * rows * length
        found.carry(name, **{"batching.tokens": tokens})
        found.changed.append(
            f"{name}: {rows}: rows are packed, so a micro-batch is a bin of {rows} x {length} "
            f"{f'x {answers} answers ' if answers > 1 else ''}= {tokens} tokens with more rows than {rows}; "
            f"batching.packing=false batching.rows={rows} pads rows as before"
        )
    else:
        found.lost[name] = f"the file has no length: batching.tokens is {rows} times dataset.max_length"


def _leave_out_refused(found: Conversion) -> RunConfig:
    """Leave out what a run refuses, with its reason, until it accepts the rest; returns that run."""
    while True:
        rows = [] if {"dataset.path", "dataset"} <= {*found.words} or found.words.get("dataset") == "mix" else [_ROWS]
        told = rows
        rows = rows if "dataset" in found.words else [f"dataset=auto {each}" for each in rows]
        try:
            words = [f"{key}={as_override(literal(value))}" for key, value in found.words.items()]
            run = compose_run(split_arguments([*" ".join(rows).split(), *words])[0])
        except ConfigError as refusal:
            wrong = {
                key: problem
                for problem in refusal.problems
                for key in found.words
                if problem.startswith((f"{key}=", f"{key}.kind="))
            }
            if not wrong:
                raise
            for key, problem in wrong.items():
                del found.words[key]
                for name in [name for name in found.carried if key in _keys_of(found, name)]:
                    del found.carried[name]
                    found.lost[name] = problem
        else:
            if told:
                found.changed.append("the file names no rows that this program finds: type dataset=FILE beside from=")
            return run


def _tell_replacements(found: Conversion, run: RunConfig) -> None:
    """Name the choice that the run makes in place of a lost one, such as the optimizer of its recipe."""
    for name, reason in found.lost.items():
        is_group = name in choices_by_group()
        group = name if is_group else setting_of(found.facts["columns"], name, "").get("here", "")
        kind = getattr(getattr(run, group, None), "kind", "")
        if kind:
            found.lost[name] = f"{reason.rstrip('.')}. {group}={kind} is used"
