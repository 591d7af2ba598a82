"""Conversion of the datasets of other programs: lists of sources, names of a dataset file, IDs with a sample count."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from yaml import YAMLError

from app.config.conf_files import read_yaml
from app.config.converted_settings import UNSET, Conversion
from app.config.kinds import ROW_FORMATS
from app.config.validate import format_value
from app.files import read_object

_NAMES_OF_ROWS = {"completion": "text", "pretrain": "text"}  # Axolotl row types that are not chats
_CHAT_ROWS = ("chat_template", "chat_template.default", "sharegpt", "None")  # Axolotl row types of messages
_COLUMNS = (
    *("messages", "instruction", "input", "output", "system"),
    *("prompt", "chosen", "rejected", "completion", "label"),
)
_FILE_TYPES = ("json", "csv", "parquet", "text")  # as `path`: the rows are in data_files
_MESSAGE_KEYS = [
    dict(zip(("role", "content"), row_format.message, strict=False))
    for row_format in ROW_FORMATS.values()
    if row_format.message
]


def _write_sources(conversion: Conversion, name: str, sources: list[dict[str, Any]]) -> None:
    """Convert one source to `dataset`, several to a mixture."""
    if len(sources) == 1:
        words = {f"dataset.{key}": text for key, text in sources[0].items() if key != "format"}
        conversion.convert(name, dataset=sources[0].get("format", "auto"), **words)
    else:
        mix = {
            f"dataset.mix.source{n}.{key}": text for n, source in enumerate(sources, 1) for key, text in source.items()
        }
        conversion.convert(name, dataset="mix", dataset__format="auto", **mix)


# ---- lists of Axolotl and TRL


def datasets(conversion: Conversion, name: str, value: Any) -> None:
    """Convert a list of datasets of Axolotl or TRL; `type` may be a mapping of columns."""
    sources = value if isinstance(value, list) else []
    if not all(isinstance(entry, Mapping) and "path" in entry for entry in sources) or not sources:
        conversion.not_converted[name] = "entries without path"
        return
    rows = [
        _source(conversion, f"{name}[{number}]", source)
        for number, entry in enumerate(sources)
        for source in _split_by_file(entry)
    ]
    _write_sources(conversion, name, rows)
    if has_alpaca_prompts(conversion):
        conversion.convert(f"{name}.type", model__chat_template="alpaca")
        conversion.changed.append(
            f"{name}: type: alpaca: model.chat_template=alpaca writes the same prompts, but the input of a row follows "
            "its instruction without a heading. Leave model.chat_template out to use the model's chat template"
        )


def has_alpaca_prompts(conversion: Conversion) -> bool:
    """Return whether Axolotl would write the prompts of all rows as Alpaca does, whatever the chat template."""
    entries = conversion.settings.get("datasets")
    return (
        conversion.program == "axolotl"
        and not conversion.has("rl")
        and isinstance(entries, list)
        and bool(entries)
        and all(isinstance(entry, Mapping) and entry.get("type") == "alpaca" for entry in entries)
    )


def _split_by_file(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one dataset per file if `path` is a file type."""
    files = entry.get("data_files")
    names = files if isinstance(files, list) else [files]
    if entry["path"] not in _FILE_TYPES or not all(isinstance(file, str) for file in names):
        return [{**entry}]
    return [{**{key: text for key, text in entry.items() if key != "data_files"}, "path": file} for file in names]


def _source(conversion: Conversion, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of one dataset; its other settings are not converted."""
    columns = {"field": "text", **{f"field_{column}": column for column in _COLUMNS}}
    kind = entry.get("type")
    source = {**entry, **(kind if isinstance(kind, Mapping) else {})}
    if conversion.has("rl"):  # the messages are the prompt of both answers
        columns["field_messages"] = "prompt"
        if kind == "chat_template.default":
            source.setdefault("field_messages", "messages")
    elif conversion.program == "axolotl" and isinstance(kind, str) and not _has_known_rows(kind):
        conversion.not_converted[f"{name}.type"] = f"{kind}: the format is detected from the columns of the rows"
    keys = {"path": "path", "split": "split", "name": "hub_config", "revision": "revision"}
    keys |= {theirs: f"columns.{ours}" for theirs, ours in columns.items()}
    for key, value in source.items():
        if key not in (*keys, "type", "ds_type") and not _is_default(key, value):
            conversion.not_converted[f"{name}.{key}"] = f"{format_value(value)}: dataset.columns and dataset.format"
    rows = _NAMES_OF_ROWS.get(str(kind))
    read = {keys[key]: value for key, value in source.items() if key in keys and keys[key] != f"columns.{value}"}
    return read | ({"format": rows} if rows else {})


def _has_known_rows(kind: str) -> bool:
    return kind in (*_NAMES_OF_ROWS, *_CHAT_ROWS) or kind.startswith("alpaca")


def _is_default(key: str, value: Any) -> bool:
    """Return whether a dataset setting names message keys or roles that are supported by default."""
    if key == "message_property_mappings":
        return value in _MESSAGE_KEYS
    if key == "roles":
        return isinstance(value, Mapping) and all(names in (role, [role]) for role, names in value.items())
    if key in ("message_field_role", "message_field_content"):
        return any(keys[key.rpartition("_")[2]] == value for keys in _MESSAGE_KEYS)
    return value in UNSET


def held_out(conversion: Conversion, name: str, value: Any) -> None:
    """Convert Axolotl's list of eval datasets."""
    if value in UNSET:
        conversion.not_needed[name] = "not set"
        return
    if not isinstance(value, list) or len(value) != 1 or not isinstance(value[0], Mapping) or "path" not in value[0]:
        conversion.not_converted[name] = "dataset.eval_path accepts one file"
        return
    source = _source(conversion, f"{name}[0]", value[0])
    conversion.convert(name, dataset__eval_path=source.pop("path"))
    conversion.not_converted |= {
        f"{name}[0].{key}": "eval rows use the format of the training rows"
        for key, text in source.items()
        if key != "format" and conversion.words.get(f"dataset.{key}") != text
    }


# ---- names in a file of LLaMA-Factory


_INFO = "dataset_info.json"
_MESSAGE_COLUMNS = ("conversations", "messages")
_ROW_COLUMNS = ("prompt", "query", "response", "messages")
# other columns of an entry, with the columns here
_OTHER_COLUMNS = {**{name: name for name in ("history", "system", "tools", "chosen", "rejected")}, "kto_tag": "label"}
_TAGS = {  # supported values, the default first
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}
_ROW_KEYS = ("file_name", "hf_hub_url", "subset", "split", "num_samples", "formatting", "columns", "tags", "ranking")
_OTHER_HUBS = ("ms_hub_url", "om_hub_url")


def named_datasets(conversion: Conversion, name: str, value: Any) -> None:
    """Convert names of dataset_info.json, which is searched in `dataset_dir`, next to the file and above it."""
    key = "dataset.eval_path" if name.startswith("eval") else "dataset"
    if value in UNSET:
        conversion.not_needed[name] = "not set"
        return
    names = [str(text).strip() for text in (value.split(",") if isinstance(value, str) else value)]
    folder = conversion.settings.get("dataset_dir") or "data"
    place = conversion.near(f"{folder}/{_INFO}") or conversion.near(_INFO)
    info = {} if place is None else read_object(place)
    missing = [title for title in names if not isinstance(info.get(title), Mapping)]
    if place is None or missing:
        problem = f"{', '.join(missing)} not in {place}" if place else f"a name in {_INFO}, which was not found"
        conversion.not_converted[name] = f"{format_value(value)}: {problem}. Set {key}=FILE, or a hub ID ORG/NAME"
        return
    sources = [_named(conversion, f"{name}[{title}]", info[title], place.parent) for title in names]
    _write_named(conversion, name, [source for source in sources if source], is_eval=name == "eval_dataset")


def _write_named(conversion: Conversion, name: str, sources: list[dict[str, Any]], *, is_eval: bool) -> None:
    """Convert training datasets, or one eval dataset, whose rows have the format of the training rows."""
    if not sources:
        conversion.not_converted[name] = "no dataset with text rows in a file or on the Hugging Face hub"
    elif not is_eval:
        _write_sources(conversion, name, sources)
    elif len(sources) == 1:
        conversion.convert(name, dataset__eval_path=sources[0]["path"])
    else:
        conversion.not_converted[name] = "dataset.eval_path accepts one file"


def _named(conversion: Conversion, name: str, entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keys of one dataset of the file; empty if its rows cannot be read."""
    file, hub = entry.get("file_name"), entry.get("hf_hub_url")
    if not isinstance(file, str) and not isinstance(hub, str):
        conversion.not_converted[name] = "neither file_name nor hf_hub_url"
        return {}
    problems = _entry_problems(entry)
    conversion.not_converted |= {f"{name}.{key}": problem for key, problem in problems.items()}
    source = {"path": str(folder / file) if isinstance(file, str) else hub}
    for theirs, ours in {"subset": "hub_config", "split": "split", "num_samples": "sample"}.items():
        if entry.get(theirs) is not None:
            source[ours] = entry[theirs]
    return source | dict(_columns_of(conversion, entry))


def _entry_problems(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return why parts of an entry are not converted."""
    columns, tags = _mapping(entry, "columns"), _mapping(entry, "tags")
    is_chat = entry.get("formatting") in ("sharegpt", "openai")
    problems = {
        key: f"{format_value(value)}: not supported"
        for key, value in entry.items()
        if key not in (*_ROW_KEYS, *_OTHER_HUBS) and value is not None
    }
    if entry.get("formatting", "alpaca") not in ("alpaca", "sharegpt", "openai"):
        problems["formatting"] = f"{entry['formatting']}: the format is detected from the columns of the rows"
    problems |= {
        f"columns.{key}": f"{format_value(value)}: only text is trained"
        for key, value in columns.items()
        if key not in (*_ROW_COLUMNS, *_OTHER_COLUMNS) and value
    }
    keys = dict(zip(("role", "content"), _message(entry), strict=True))
    keys |= {key: tags[f"{key}_tag"] for key in keys if f"{key}_tag" in tags}
    if is_chat and keys not in _MESSAGE_KEYS:
        problems["tags"] = f"{format_value(tags)}: rename the keys in the rows to role and content"
    elif any(value not in _TAGS[key] for key, value in tags.items() if key in _TAGS and value):
        problems["tags"] = f"{format_value(tags)}: rename the roles in the rows to user and assistant"
    return problems


def _message(entry: Mapping[str, Any]) -> tuple[str, str]:
    return ("role", "content") if entry.get("formatting") == "openai" else ("from", "value")


def _mapping(entry: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = entry.get(key)
    return value if isinstance(value, Mapping) else {}


def _columns_of(conversion: Conversion, entry: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the columns of an entry that differ from the defaults here; rows of `stage: pt` are texts."""
    columns = _mapping(entry, "columns")
    has_prompt = entry.get("ranking") is True or "kto_tag" in columns  # rows of preferences
    if conversion.settings.get("stage") == "pt":
        names = {"text": columns.get("prompt", "instruction")}
        yield "format", "text"
    elif entry.get("formatting") in ("sharegpt", "openai"):
        messages = columns.get("messages", "conversations")
        # messages are found under any column name
        names = {"prompt": messages} if has_prompt else {} if messages in _MESSAGE_COLUMNS else {"messages": messages}
    else:
        used = columns or {"prompt": "instruction", "query": "input", "response": "output"}
        names = {"prompt": used.get("prompt"), "completion": used.get("response")}
        if not has_prompt:
            names = {"instruction": names["prompt"], "output": names["completion"]}
            if used.get("query") != "input":
                yield "columns.input", used.get("query")
    names |= {_OTHER_COLUMNS[key]: value for key, value in columns.items() if key in _OTHER_COLUMNS}
    yield from ((f"columns.{here}", name) for here, name in names.items() if isinstance(name, str) and name != here)


# ---- a file of sources, of LLaMA-Factory v1


def dataset_file(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the path of a YAML file with named sources, or of a file with rows."""
    if value in UNSET:
        conversion.not_needed[name] = "not set"
        return
    file = conversion.near(str(value))
    if Path(str(value)).suffix not in (".yaml", ".yml"):
        _write_named(conversion, name, [{"path": value}], is_eval=name == "eval_dataset")
        return
    try:
        sources = read_yaml(file) if file else None
    except (OSError, ValueError, YAMLError):
        sources = None
    if file is None or not isinstance(sources, Mapping):
        key = "dataset.eval_path" if name.startswith("eval") else "dataset"
        conversion.not_converted[name] = f"{value}: cannot be read. Set {key}=FILE, or a hub ID ORG/NAME"
        return
    root = Path(str(file).removesuffix(str(value)))  # the folder that its paths are relative to
    rows = [_of_file(conversion, f"{name}[{title}]", entry, root) for title, entry in sources.items()]
    _write_named(conversion, name, [source for source in rows if source], is_eval=name == "eval_dataset")


def _of_file(conversion: Conversion, name: str, entry: Any, root: Path) -> dict[str, Any]:
    """Return the keys of one source; its `converter` is the format of dataset_info.json."""
    if not isinstance(entry, Mapping):
        conversion.not_converted[name] = f"{format_value(entry)}: not a source"
        return {}
    converter = entry.get("converter", "alpaca")
    data = {key: value for key, value in entry.items() if key not in ("converter", "dataset_dir", "streaming")}
    folder = root / str(entry.get("dataset_dir") or "")
    formatting = {"pair": "sharegpt"}.get(converter, converter)
    return _named(conversion, name, {**data, "formatting": formatting}, folder)


# ---- IDs of ms-swift


_SWIFT_DATASET = re.compile(r"(?P<path>[^:#]+)(?::(?P<subset>[^#]+))?(?:#(?P<rows>\d+))?")
_PLACEHOLDERS = "swift/self-cognition"


def swift_datasets(conversion: Conversion, name: str, value: Any) -> None:
    """Convert paths and IDs with a subset and a number of rows, `ID:SUBSET#ROWS`."""
    entries = [str(entry) for entry in (value if isinstance(value, list) else [value])]
    sources = [source for entry in entries if (source := _of_swift(conversion, name, entry))]
    if not sources:
        conversion.not_converted.setdefault(name, f"{format_value(value)}: set dataset=FILE, or a hub ID ORG/NAME")
        return
    _write_named(conversion, name, sources, is_eval=name == "val_dataset")
    hub = [source["path"] for source in sources if conversion.near(source["path"]) is None]
    if hub and not conversion.settings.get("use_hf"):
        conversion.changed.append(f"{name}: {', '.join(hub)}: read from the Hugging Face hub, not from ModelScope")


def _of_swift(conversion: Conversion, name: str, entry: str) -> dict[str, Any]:
    match = _SWIFT_DATASET.fullmatch(entry)
    if match is None or match["path"] == _PLACEHOLDERS:
        conversion.not_converted[f"{name}[{entry}]"] = "rows with placeholders that ms-swift fills"
        return {}
    rows = {"sample": int(match["rows"])} if match["rows"] else {}
    return {"path": match["path"], **({"hub_config": match["subset"]} if match["subset"] else {}), **rows}


def paths(conversion: Conversion, name: str, value: Any) -> None:
    """Convert the path of a dataset whose format is detected."""
    if value in UNSET:
        conversion.not_needed[name] = "not set"
    else:
        conversion.convert(name, dataset="auto", dataset__path=value)
