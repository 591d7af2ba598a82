"""What `dataset.path` names: files, a folder of them, a saved dataset, a hub id. Imports nothing heavy."""

import difflib
import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from app.assets import locate
from app.config.dataset import key_of, sources_of
from app.config.schema import DatasetConfig
from app.data.readers import READERS, TEXT_FILES, extension, open_file, read_file
from app.data.types import Located, Source, printable
from app.errors import DataError, EnvironmentProblem

_EDGE_BYTES = 1 << 20
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class FileRows:
    """Files that are read here, in the order of their names."""

    name: str
    key: str
    files: tuple[tuple[Path, str], ...]  # where, and what places call it
    left_out: tuple[str, ...] = ()

    def rows(self) -> Iterator[Located]:
        """Every row of every file."""
        for path, name in self.files:
            try:
                yield from read_file(path, name)
            except DataError as error:
                raise DataError([f"{problem}; {self._advice()}" for problem in error.problems]) from error

    def _advice(self) -> str:
        where = "given by" if len(self.files) == 1 else "or leave it out of"
        return f"mend the file, {where} {self.key}={self.name}"

    def fingerprint(self) -> str:
        """A hash of the files and the shown names."""
        return files_hash(self.files)


def check(config: DatasetConfig, *, training: bool = True) -> list[str]:
    """What is wrong with the paths, as far as a look at the disk can tell; of an evaluation, with the one it reads."""
    problems: list[str] = []
    named = {f"{key_of(name)}.path": (each.path, each.format) for name, each in sources_of(config).items()}
    if not training and config.eval_path is not None:
        named = {}
    named["dataset.eval_path"] = (config.eval_path, config.format)
    for key, (path, fmt) in named.items():
        try:
            if path is not None and not _is_hub_id(path) and not is_saved_dataset(_local(path)):
                _find_files(path, key, fmt)
        except DataError as error:
            problems += error.problems
    if config.eval_split and not config.eval_path and _are_files(config.path):
        problems.append(
            f"dataset.eval_split={config.eval_split}: files have no splits; name the held-out rows with"
            " dataset.eval_path=FILE, or let dataset.eval_fraction choose them"
        )
    return problems


def train_source(config: DatasetConfig, name: str = "") -> Source:
    """The rows of `dataset.path`; of the section of one source of a mix, by its `name`."""
    return _open(_given(config), f"{key_of(name)}.path", config, config.split, config.revision)


def _given(config: DatasetConfig) -> str:
    assert config.path is not None, "a mix is opened source by source"
    return config.path


def _are_files(path: str | None) -> bool:
    return path is not None and _local(path).exists() and not is_saved_dataset(_local(path))


def eval_source(config: DatasetConfig) -> Source | None:
    """The rows that the config names for evaluation, if it names any."""
    if config.eval_path is not None:  # another dataset: the revision of the first does not hold for it
        split = config.eval_split or config.split
        revision = config.revision if config.eval_path == config.path else None
        return _open(config.eval_path, "dataset.eval_path", config, split, revision)
    if config.eval_split is not None:
        return _open(_given(config), "dataset.path", config, config.eval_split, config.revision)
    return None


def _open(path: str, key: str, config: DatasetConfig, split: str, revision: str | None) -> Source:
    if _is_hub_id(path):
        return HubRows(path, key, split, config.hub_config, revision)
    if is_saved_dataset(_local(path)):
        return SavedRows(path, key, _local(path), split)
    return _find_files(path, key, config.format)


def _local(path: str) -> Path:
    return Path(locate(path)).expanduser()


def _is_hub_id(path: str) -> bool:
    """`org/name`, unless a file or folder of this machine is more likely meant."""
    place = Path(path)
    if _HUB_ID.fullmatch(path) is None or place.exists() or extension(place) in READERS:
        return False
    return not place.parent.exists()


def _find_files(path: str, key: str, fmt: str) -> FileRows:
    place = _local(path)
    if place.is_file():
        return FileRows(path, key, ((_readable(place, key), printable(place.name)),))
    if place.is_dir():
        return _folder(path, place, key, fmt)
    if glob.has_magic(path):
        return _matches(path, place, key)
    raise DataError(_missing(path, place, key))


def _readable(path: Path, key: str) -> Path:
    if extension(path) not in READERS:
        known = " ".join(READERS)
        raise DataError(f"{key}={path}: unknown kind of file; known: {known} (each also with .gz)")
    return path


def _matches(path: str, place: Path, key: str) -> FileRows:
    """The files of a pattern; each was asked for, so each must be readable."""
    root = _fixed_part(place)
    found = sorted(match for match in root.glob(str(place.relative_to(root))) if match.is_file())
    files = [file for file in found if not _is_hidden(file.relative_to(root))]
    if not files:
        raise DataError(f"{key}={path}: the pattern matches no file")
    shown = [printable(file.relative_to(root).as_posix()) for file in files]
    return FileRows(
        path, key, tuple((_readable(file, key), name) for file, name in zip(files, shown, strict=True))
    )


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _fixed_part(pattern: Path) -> Path:
    """The folder that every match lies in."""
    while glob.has_magic(str(pattern)):
        pattern = pattern.parent
    return pattern


def _folder(path: str, place: Path, key: str, fmt: str) -> FileRows:
    """All readable files below a folder; text beside tables is a read-me, unless text is what is wanted."""
    shown = {file: file.relative_to(place) for file in sorted(place.rglob("*")) if file.is_file()}
    visible = [file for file, name in shown.items() if not _is_hidden(name)]
    known = [file for file in visible if extension(file) in READERS]
    tables = [file for file in known if extension(file) not in TEXT_FILES]
    if not known:
        raise DataError(f"{key}={path}: the folder holds no file of a known kind: {' '.join(READERS)}")
    if tables and len(tables) < len(known) and fmt == "text":
        raise DataError(
            f"{key}={path}: holds text files and tables; choose with a pattern, such as {key}='{path}/*.txt'"
        )
    chosen = tables or known
    left_out = tuple(printable(shown[file].as_posix()) for file in visible if file not in set(chosen))
    return FileRows(path, key, tuple((file, printable(shown[file].as_posix())) for file in chosen), left_out)


def _missing(path: str, place: Path, key: str) -> str:
    message = f"{key}={path}: no such file or folder"
    if not place.is_absolute():
        message += f" in {Path.cwd()}"
    beside = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = difflib.get_close_matches(place.name, beside, n=3)
    if near:
        message += f"; did you mean {' or '.join(str(Path(path).with_name(name)) for name in near)}?"
    if _HUB_ID.fullmatch(path) and extension(place) not in READERS:
        message += (
            f"; it looks like a hub id, but the folder {place.parent} here is taken for a part of the path"
        )
    elif "/" not in path and not extension(place):
        message += "; a dataset of the hub is named ORG/NAME"
    return message


_TIMEOUT_SECONDS = (
    10.0  # of the one question that decides whether the hub answers; `datasets` would try for minutes
)


def is_saved_dataset(place: Path) -> bool:
    """Whether `place` was written by `save_to_disk`: a dictionary of splits, or one split."""
    if (place / "dataset_dict.json").is_file():
        return True
    return (place / "state.json").is_file() and (place / "dataset_info.json").is_file()


@dataclass(frozen=True)
class HubRows:
    """One split of a hub dataset, downloaded when first asked for; when offline, from the local cache."""

    name: str
    key: str
    split: str
    hub_config: str | None
    revision: str | None
    left_out: tuple[str, ...] = ()

    def rows(self) -> Iterator[Located]:
        """Every row; counted from 0, as the hub's viewer does."""
        for index, row in enumerate(self._loaded):
            yield f"{self.name}[{self.split}] row {index}", row

    def fingerprint(self) -> str:
        """What `datasets` derives from the files' hashes and the split."""
        return _sha256(self.name, self.split, self.hub_config, self._loaded._fingerprint)

    @cached_property
    def _loaded(self) -> Any:
        import datasets
        from huggingface_hub import errors as hub

        reason = self._why_unreachable()
        was_offline = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = bool(reason) or was_offline
        try:
            loaded = datasets.load_dataset(
                self.name, self.hub_config, split=self.split, revision=self.revision
            )
        except (hub.HTTPError, OSError) as error:
            told = f"{reason}, and it is not in the local cache" if reason else _first_line(error)
            raise self._problem(told) from error
        except (ValueError, datasets.exceptions.DatasetsError) as error:  # lists the splits or configurations
            given = f"{self.key}={self.name} dataset.split={self.split} dataset.hub_config={self.hub_config}"
            raise DataError(f"{given}: {_first_line(error)}") from error
        finally:
            datasets.config.HF_HUB_OFFLINE = was_offline
        if reason and self.revision and not any(self.revision in f["filename"] for f in loaded.cache_files):
            raise self._problem(
                f"{reason}, and the local cache has only another revision than {self.revision}"
            )
        return loaded

    def _why_unreachable(self) -> str:
        """Empty if the hub answers. Absent or gated is an error at once."""
        from huggingface_hub import HfApi
        from huggingface_hub import errors as hub

        try:
            HfApi().dataset_info(self.name, revision=self.revision, timeout=_TIMEOUT_SECONDS)
        except hub.GatedRepoError as error:
            page = f"https://huggingface.co/datasets/{self.name}"
            raise self._problem(f"gated: accept its terms at {page}") from error
        except hub.RevisionNotFoundError as error:
            raise self._problem(f"the hub has it, but not dataset.revision={self.revision}") from error
        except hub.RepositoryNotFoundError as error:
            raise self._problem("not on the hub, or private") from error
        except hub.OfflineModeIsEnabled:
            return "offline (HF_HUB_OFFLINE is set)"
        except (
            hub.HTTPError,
            OSError,
        ) as error:  # the transport's own errors are no OSError in every version
            return f"the hub cannot be reached ({_first_line(error)})"
        return ""

    def _problem(self, what: str) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"{self.key}={self.name}: {what}. For a gated or private dataset set HF_TOKEN to a token that may"
            f" read it (https://huggingface.co/settings/tokens); or download it and give {self.key}=FILE"
        )


@dataclass(frozen=True)
class SavedRows:
    """One split of a folder written by `save_to_disk`."""

    name: str
    key: str
    place: Path
    split: str
    left_out: tuple[str, ...] = ()

    def rows(self) -> Iterator[Located]:
        """Every row, counted from 0."""
        import datasets

        try:
            loaded = datasets.load_from_disk(str(self.place))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.key}={self.name}: cannot be read: {_first_line(error)}") from error
        shown = self.name
        if isinstance(loaded, datasets.DatasetDict):
            if self.split not in loaded:
                known = ", ".join(sorted(loaded))
                raise DataError(f"{self.key}={self.name}: no dataset.split={self.split}; it has: {known}")
            loaded, shown = loaded[self.split], f"{self.name}[{self.split}]"
        for index, row in enumerate(loaded):
            yield f"{shown} row {index}", row

    def fingerprint(self) -> str:
        """A hash of the folder's files."""
        files = [file for file in sorted(self.place.rglob("*")) if file.is_file()]
        content = files_hash((file, file.relative_to(self.place).as_posix()) for file in files)
        return _sha256(self.name, self.split, content)


def _sha256(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def files_hash(files: Iterable[tuple[Path, str]]) -> str:
    """Of the name that each file goes by, its size, the time of its last write, its first and its last megabyte."""
    digest = hashlib.sha256()
    for path, name in files:
        with open_file(path) as stream:
            found = os.fstat(stream.fileno())
            digest.update(f"{name}\0{found.st_size} {found.st_mtime_ns}\n".encode())
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(0, found.st_size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    return digest.hexdigest()
