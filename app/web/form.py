"""Form for a new run or sweep: its fields, its settings as typed on the command line, and their problems."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from threading import Lock

from hydra.errors import HydraException

from app.config.arguments import split_arguments
from app.config.commands import CHECKS, check_config
from app.config.conf_files import choices_by_group, purpose_of, read_choice
from app.config.load import compose_run, default_choices, values_with
from app.config.overrides import as_override, flat, key_of, parse_override, untrusted_problems, values_in
from app.config.validate import STARTS_PROCESSES, format_value
from app.errors import AppError, ConfigError, refuse
from app.program import TARGETS
from app.sweeps.search_space import is_sweep_key
from app.sweeps.sweep import plan_sweep

# names of fields are keys of settings; the last one has any settings, one per line
_GROUPS = ("recipe", "model", "dataset", "sweep")
_PLACES = {"model.path": "folder", "dataset.path": "auto"}  # with the choice of the group that reads the path
NUMBERS = {
    "training.epochs": "Epochs",
    "optimizer.lr": "Learning rate",
    "adapter.r": "LoRA rank",
    "dataset.max_length": "Maximum length",
}
_MORE = "settings"
_UNQUOTED = re.compile(r"[\w./~-]+", re.ASCII)
_UNSAFE = re.compile(r"[^\w.-]+", re.ASCII)
_MAX_CACHED = 200
_composing = Lock()  # Hydra composes one configuration at a time
_defaults: dict[tuple[str, ...], Mapping[str, str]] = {}


@cache
def _default_choices() -> Mapping[str, str | None]:
    with _composing:
        return default_choices()


@cache
def options() -> Mapping[str, Sequence[tuple[str, str]]]:
    """Return the choices of each select with their descriptions: datasets with rows, and sweeps that train.

    The first one is empty: the default.
    """
    names = {group: choices_by_group()[group] for group in _GROUPS}
    shown = {
        **names,
        "dataset": ["auto", *(name for name in names["dataset"] if read_choice("dataset", name).get("path"))],
        "sweep": [name for name in names["sweep"] if not read_choice("sweep", name).get("planned")],
    }
    chosen = _default_choices()
    firsts = {group: f"default ({chosen[group]})" if group in chosen else "no sweep" for group in _GROUPS}
    labels = {group: [(name, f"{name}: {purpose_of(group, name)}") for name in shown[group]] for group in _GROUPS}
    return {group: [("", firsts[group]), *labels[group]] for group in _GROUPS}


def settings_of(form: Mapping[str, str]) -> list[str]:
    """Return the settings of a form; empty fields add none, and a path selects the choice that reads it."""
    more = [line.strip() for line in form.get(_MORE, "").splitlines() if line.strip()]
    fields = {key: form.get(key, "").strip() for key in (*_GROUPS, *_PLACES, *NUMBERS)}
    for key, choice in _PLACES.items():
        group = key.partition(".")[0]
        if fields[key] and not fields[group] and group not in map(key_of, more):
            fields[group] = choice
    words = {
        key: text if key not in _PLACES or _UNQUOTED.fullmatch(text) else as_override(text)
        for key, text in fields.items()
        if text
    }
    return [*(f"{key}={text}" for key, text in words.items()), *more]


def is_sweep(settings: Iterable[str]) -> bool:
    """Return whether settings have several values or select a sweep."""
    return any(is_sweep_key(text) or _is_swept(text) for text in settings)


def _is_swept(text: str) -> bool:
    try:
        return parse_override(text).is_sweep_override()
    except HydraException:
        return False


def check_settings(settings: Sequence[str], what: str) -> int:
    """Return the number of runs, several for a sweep; raise an error with all problems, as on the command line."""
    problems = [f"{text}: set by the run name. Leave it out." for text in settings if key_of(text) in TARGETS]
    words = [text for text in settings if not text.startswith("-")]
    problems += untrusted_problems(values_in(words), "the form", allowed=(STARTS_PROCESSES,))
    count = 0
    try:
        with _composing:
            count = _count(settings, what)
    except AppError as error:
        problems += error.problems
    refuse(problems)
    return count


def _count(settings: Sequence[str], what: str) -> int:
    swept = [key_of(text) for text in settings if is_sweep([text])]
    if what in CHECKS and swept:
        raise ConfigError(f"{', '.join(swept)}: check {what} takes one run. Set one value, or start the sweep.")
    if what in CHECKS:
        check_config([what, *settings])
        return 1
    overrides, switches, _ = split_arguments(settings, sweep=bool(swept))
    refuse(f"{word}: the form accepts only settings. Leave it out." for word in switches)
    if swept:
        return plan_sweep(settings, lambda _: None).proposer.count
    compose_run(overrides)
    return 1


def defaults_of(settings: Iterable[str]) -> Mapping[str, str]:
    """Return the default of each number field for the other settings; empty if they do not compose."""
    others = tuple(text for text in settings if key_of(text) not in NUMBERS and not text.startswith("-"))
    defaults = _defaults.get(others)
    if defaults is None:
        with _composing:
            defaults = _composed_defaults(others)
        if len(_defaults) >= _MAX_CACHED:
            _defaults.clear()
        _defaults[others] = defaults
    return defaults


def _composed_defaults(settings: Sequence[str]) -> Mapping[str, str]:
    if "from" in map(key_of, settings):
        return {}  # the defaults come from a run or a file
    try:
        data = dict(flat("", values_with(settings)))
    except ConfigError:
        return {}
    return {key: format_value(data.get(key, "none")) for key in NUMBERS}


def proposed_name(form: Mapping[str, str], taken: Iterable[str]) -> str:
    """Return an unused run name: the model and the recipe, with a number if needed."""
    chosen = _default_choices()
    model = form.get("model.path", "").rstrip("/").rpartition("/")[2] or form.get("model", "") or chosen["model"]
    words = (form.get("sweep", ""), model, form.get("recipe", "") or chosen["recipe"])
    name = _UNSAFE.sub("_", "-".join(filter(None, words))).lstrip("._-")[:80] or "run"
    names = set(taken)
    return next(text for text in (name, *(f"{name}-{at}" for at in range(2, len(names) + 3))) if text not in names)
