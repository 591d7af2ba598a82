"""`from=FILE.yaml`: groups and keys of a file, as if each were typed in front of the command line."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from yaml import YAMLError

from app.config.yaml_files import literal, read_yaml
from app.errors import ConfigError, gist, refuse

WARMUPS = ("schedule.warmup_steps", "schedule.warmup_fraction")  # one replaces the other
_FROM = "varied_from="  # the word `from=` as a key of the schema
# the file may come from others: these run code of a model, or say where compiled kernels and hooks of Hydra are
TYPED_ALONE = ("model.trust_remote_code", "cache_dir", "hydra")


def names_file(word: str) -> bool:
    """Whether a word is `from=FILE`, not `from=RUN`."""
    place = _place(word.removeprefix(_FROM).strip("'\""))
    return word.startswith(_FROM) and (place.suffix in (".yaml", ".yml") or os.path.isfile(place))  # noqa: PTH113


def _place(given: str) -> Path:
    return Path(os.path.expanduser(given))  # noqa: PTH111 (Path's raises for a user that is not known)


def with_settings(words: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The words with each `from=FILE` replaced by what is in the file, without the `typed` keys, which win."""
    files = [word.removeprefix(_FROM).strip("'\"") for word in words if names_file(word)]
    settings = {key: value for file in files for key, value in _settings(file).items()}
    replaced = {*typed, *(WARMUPS if {*WARMUPS} & {*typed} else ())}
    of_file = [f"{key}={as_override(value)}" for key, value in settings.items() if key not in replaced]
    return [*of_file, *(word for word in words if not names_file(word))]


def _settings(given: str) -> dict[str, Any]:
    file = _place(given)
    if file.name == "run.yaml" and (file.parent / "manifest.json").is_file():
        raise ConfigError(f"from={given}: it is the run.yaml of a run. Give its folder: from={file.parent}")
    try:
        data = read_yaml(file)
    except FileNotFoundError:
        raise ConfigError(
            f"from={given}: there is no such file. Give a YAML file of settings, or the output_dir of a run."
        ) from None
    except (OSError, ValueError, YAMLError) as fault:
        raise ConfigError(f"from={given}: it cannot be read as settings: {gist(fault)}. Mend the file.") from fault
    if not isinstance(data, Mapping):
        raise ConfigError(f"from={given}: it has no settings. Write them as key: value, such as recipe: lora.")
    settings = dict(flat("", literal(data)))
    sections = tuple(f"{each}." for each in TYPED_ALONE)
    alone = [key for key, value in settings.items() if f"{key}.".startswith(sections) and value is not False]
    refuse(f"{key} in {given}: a file of settings cannot decide it. Type it beside from={given}." for key in alone)
    return settings


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`optimizer.lr`, x for `optimizer: {lr: x}`."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def as_override(value: Any) -> str:
    """A value in Hydra's grammar."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{as_override(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, int | float):
        return repr(value)
    return QuotedString(str(value), Quote.double).with_quotes()
