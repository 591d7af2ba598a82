"""Source of a model: a local folder or a snapshot of a hub repository; one message if it is missing.

A fingerprint identifies the weights of a folder without reading all of them.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from app.assets import locate
from app.config.adapters import ADAPTER, ADAPTER_WEIGHTS
from app.config.conf_files import choices_by_group, read_choice
from app.config.schema import ModelConfig
from app.errors import AppError, ConfigError, EnvironmentProblem, gist
from app.files import irregular_files, read_json, read_object, require_intact

REMOTE_CODE = "Custom code of a model runs only with model.trust_remote_code=true."
_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
_WEIGHT_FILES = ["*.safetensors"]
_HASHED_BLOCKS, _BLOCK_BYTES = 64, 64 << 10
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE_KEY = "transformers_weights"  # key in config.json that names the weight file
_AGAIN = "Download the model again, or set another model.path."
_MODELOPT = "hf_quant_config.json"  # its older folders have no section in config.json
_LAYERS = re.compile(r"\w*layers|n_?layer|num_layer")
MAX_LAYERS = 10_000  # a layer is built in Python in milliseconds; the deepest published models have hundreds
_NOT_OURS = ["original/*", "consolidated*", "onnx/*", "openvino/*"]


def check(config: ModelConfig) -> list[str]:
    """Return the problem with `model.path` on this machine, before anything is loaded."""
    place = local_place(config.path)
    is_there = config.weights == "random" or place.is_dir() or _can_be_remote(config.path)
    return [] if is_there else [_no_folder(config.path)]


def fetch_folder(config: ModelConfig, path: str, *, with_weights: bool) -> Path:
    """Return the folder of `path`: itself if it is local, else a snapshot of the hub repository."""
    place = _local_folder(path)
    if place is not None:
        return place
    if not _can_be_remote(path):
        raise EnvironmentProblem(_no_folder(path))
    return _snapshot(config, path, with_weights=with_weights)


def _local_folder(path: str) -> Path | None:
    """Return the folder at `path` on this machine, if any; refuse files that are not regular: reading could hang."""
    place = local_place(path)
    if not place.is_dir():
        return None
    try:
        irregular = irregular_files(place)
    except OSError as fault:
        raise EnvironmentProblem(f"model.path={path}: {place} cannot be read ({fault.strerror}).") from fault
    if irregular:
        raise EnvironmentProblem(
            f"model.path={path}: {irregular[0]} is not a regular file, so reading it may hang. Delete it."
        )
    return place


def _can_be_remote(path: str) -> bool:
    return not (local_place(path).is_file() or path.startswith((".", "/", "~")) or path.count("/") != 1)


def _no_folder(path: str) -> str:
    return (
        f"model.path={path}: no such folder. Set a folder with config.json, tokenizer.json and "
        "*.safetensors, or a hub id like org/name."
    )


def folder_at_hand(config: ModelConfig) -> Path | None:
    """Return the folder of the model's own config.json on this machine, without asking the hub."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    place = _local_folder(config.path)
    if place is not None:
        return place
    try:
        cached = snapshot_download(config.path, revision=config.revision, local_files_only=True)
    except (OSError, HFValidationError):  # not in the cache
        return None
    return Path(cached) if (Path(cached) / "config.json").is_file() else None


def random_model_if_missing(model: ModelConfig) -> ModelConfig:
    """Return the model with random weights if its files are missing but a preset has its architecture."""
    if model.weights == "random" or "model_type" not in model.architecture or folder_at_hand(model):
        return model
    presets = (read_choice("model", name) for name in choices_by_group()["model"])
    is_preset = any(preset.get("path") == model.path for preset in presets)
    return replace(model, weights="random") if is_preset else model


def local_place(path: str) -> Path:
    """Return `path` as a path on this machine."""
    return Path(locate(path)).expanduser()


def base_path(model: ModelConfig, run_base: Path) -> str:
    """Return the base path of an adapter: the model's own, or the folder of a saved random base."""
    if model.weights == "random":
        return str(run_base.resolve())
    place = local_place(model.path)
    return str(place.resolve()) if place.is_dir() else model.path


def require_weights(folder: Path, path: str) -> None:
    """Refuse a folder that transformers could not load from safetensors."""
    read_config(folder, path)
    if any(folder.glob("*.safetensors")):
        weight_files(folder)  # refuses names in an index
        return
    pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
    content = f"only {', '.join(pickles[:3])}, which can run code when loaded" if pickles else "none"
    raise EnvironmentProblem(
        f"model.path={path}: no *.safetensors in {folder} ({content}). Convert the weights to safetensors, "
        "or set model.weights=random to train from scratch."
    )


def require_intact_base(folder: Path) -> None:
    """Refuse base/ or final/ of a run if a file has changed since it was written."""
    remedy = "Restore it from a copy of the run that wrote it. If you changed it on purpose, delete its manifest.json."
    require_intact(folder, remedy, sealed=False)


def read_config(folder: Path, path: str) -> dict[str, Any]:
    """Return the config.json of a folder; refuse one without a model type."""
    file = folder / "config.json"
    is_adapter = any((place / ADAPTER).is_file() for place in (folder, folder / "final"))
    # a classifier adapter has a config.json too, and a folder may have both a model and an adapter
    if is_adapter and all(weights.name == ADAPTER_WEIGHTS for weights in folder.glob("*.safetensors")):
        raise EnvironmentProblem(
            f"model.path={path}: this is an adapter without its base. To continue from it, set the base and the "
            f"adapter: model.path=MODEL adapter.start={path}"
        )
    try:
        numbers: dict[str, Any] = read_json(file)
        kind = numbers["model_type"]
    except FileNotFoundError:
        advice = f" The model of a run is in final/: model.path={path}/final." if (folder / "final").is_dir() else ""
        raise EnvironmentProblem(
            f"model.path={path}: {folder} has no config.json, so it is not a Hugging Face model folder.{advice}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise EnvironmentProblem(
            f"model.path={path}: {file} cannot be read as a model configuration ({type(fault).__name__}: {fault})."
        ) from fault
    if not isinstance(kind, str):
        raise EnvironmentProblem(f"model.path={path}: model_type in {file} is {kind!r}, expected a name such as llama.")
    require_layers(numbers, f"model.path={path}: {file}:")
    section = read_object(folder / _MODELOPT).get("quantization")
    if isinstance(section, dict):
        numbers.setdefault("quantization_config", {**section, "quant_method": "modelopt"})
    return numbers


def require_layers(numbers: Mapping[str, Any], where: str) -> None:
    """Refuse layer counts that no model has: building them would take hours. `where` starts the message."""
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            require_layers(value, where)
        elif isinstance(value, int) and _LAYERS.fullmatch(name) and not 0 <= value <= MAX_LAYERS:
            raise ConfigError(f"{where} {name} is {value:,}, expected 0 to {MAX_LAYERS:,}.")


def whole_numbers(config: ModelConfig, folder: Path) -> Any:
    """Return the transformers configuration in a local folder; a composite contains that of its text part."""
    from transformers import AutoConfig

    problem = f"model.path={config.path}: {folder / 'config.json'} is not supported by this version of transformers"
    with library_errors(problem, REMOTE_CODE):
        return AutoConfig.from_pretrained(
            str(folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )


@contextmanager
def library_errors(problem: str, remedy: str, error: type[AppError] = EnvironmentProblem) -> Iterator[None]:
    """Convert any exception of a library about its files to a user error; wrap only library calls.

    A model's own classes raise nearly every exception for a bad value: KeyError, AssertionError, ZeroDivisionError.
    """
    try:
        yield
    except Exception as fault:
        from app.oom_retry import is_out_of_memory  # imports torch

        if isinstance(fault, AppError | MemoryError) or is_out_of_memory(fault):
            raise
        raise error(f"{problem} ({type(fault).__name__}: {gist(fault)}). {remedy}") from fault


def _snapshot(config: ModelConfig, path: str, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = _TEXT_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        folder = snapshot_download(path, revision=config.revision, allow_patterns=patterns, ignore_patterns=_NOT_OURS)
    except (OSError, HFValidationError) as fault:  # every hub and network error is one of these
        revision = f" at revision {config.revision}" if config.revision else ""
        license = config.licence_page or f"https://huggingface.co/{path}"
        raise EnvironmentProblem(
            f"model.path={path}{revision} is not on this machine and could not be downloaded ({_reason(fault)}). "
            f"If it is gated, accept its license at {license} and set HF_TOKEN. Without a network, set a local folder: "
            "model.path=DIR. To try the architecture without its weights, set model.weights=random."
        ) from fault
    return Path(folder)


def _reason(fault: Exception) -> str:
    from huggingface_hub import constants, errors

    reasons = (
        (errors.GatedRepoError, "gated, and this account has no access"),
        (errors.RepositoryNotFoundError, "no such repository, or no access to it"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.HFValidationError, "not a valid hub id"),
    )
    for kind, reason in reasons:
        if isinstance(fault, kind):
            return reason
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return "no connection" if isinstance(fault, errors.LocalEntryNotFoundError) else type(fault).__name__


def base_fingerprint(model: ModelConfig) -> str | None:
    """Return a hash that identifies the weights of `model.path` on this machine; None for random or missing weights."""
    folder = None if model.weights == "random" else folder_at_hand(model)
    files = [] if folder is None else weight_files(folder)
    return weights_fingerprint(files) if files and all(file.is_file() for file in files) else None


def weights_fingerprint(files: list[Path]) -> str:
    """Hash names, sizes and 64 blocks of 64 KiB spread evenly over each file; files of up to 4 MiB are read whole.

    Training changes nearly all weights, so another model differs in nearly every block. A single damaged byte of a
    large file may be missed.
    """
    content = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        content.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(_HASHED_BLOCKS):
                stream.seek(max(i * _BLOCK_BYTES, i * (size - _BLOCK_BYTES) // (_HASHED_BLOCKS - 1)))
                content.update(stream.read(_BLOCK_BYTES))
    return content.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers reads; a folder of the hub may have others too.

    Names are checked, not link targets: the files of a hub cache are links into its folder of blobs.
    """
    named = read_object(folder / "config.json").get(_FILE_KEY)
    first = next((name for name in (WEIGHTS, INDEX) if (folder / name).is_file()), None) if named is None else named
    if first is None:
        return sorted(folder.glob("*.safetensors"))
    if first != INDEX:
        return [folder / _safetensors_name(first, f"{_FILE_KEY} in {folder / 'config.json'}")]
    try:
        names = set(read_json(folder / INDEX)["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as fault:
        raise EnvironmentProblem(f"{folder / INDEX} cannot be read as an index ({gist(fault)}). {_AGAIN}") from fault
    return [folder / _safetensors_name(name, str(folder / INDEX)) for name in sorted(names, key=str)]


def _safetensors_name(name: Any, place: str) -> str:
    """Return the name of a weight file; transformers would unpickle a .bin, and read files of other folders."""
    if not isinstance(name, str) or PurePath(name).name != name or not name.endswith(".safetensors"):
        raise EnvironmentProblem(
            f"{place}: {str(name)[:80]!r} is not the name of a .safetensors file in this folder. {_AGAIN}"
        )
    return name


def ignored_index(folder: Path) -> list[str]:
    """Return a remark if a folder has an index next to the one file that is read."""
    is_ignored = (folder / INDEX).is_file() and weight_files(folder) == [folder / WEIGHTS]
    return [f"{folder / INDEX} is ignored, because {WEIGHTS} is there too"] if is_ignored else []
