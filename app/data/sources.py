"""Sources of rows: files, folders and their splits, text, saved datasets, hub IDs, random rows."""

import difflib
import glob
import hashlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.assets import locate
from app.config.dataset import RANDOM, key_of, sources_of
from app.config.kinds import LABELED_FORMATS
from app.config.schema import DatasetConfig, RandomRowsConfig
from app.data.readers import READERS, TEXT_COLUMN, TEXT_FILES, named_tags, read_file, require_prose
from app.data.remote_files import RemoteFile, is_remote, remote_files
from app.data.rows import PACKED_FILES, TAGGED_FILES, DataFile, Located, escaped, extension, open_file
from app.data.transform import transform_of
from app.errors import ConfigError, DataError, EnvironmentProblem, first_line

_WORDS = 1000  # in the vocabulary, without labels
_LETTERS = 5  # per word, at least one token in any tokenizer


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Texts of random words whose first word is the label, so that a model can learn it."""

    name: str
    key: str
    config: RandomRowsConfig
    labeled: bool  # whether rows have a label column
    split: str = ""
    left_out: tuple[str, ...] = ()
    other_splits: tuple[str, ...] = ()

    @property
    def on_overflow(self) -> str:
        """Overflow policy for `auto`: rows of equal length have one word per token and are meant to be truncated."""
        return "truncate" if self.config.shortest is None else "error"

    def rows(self) -> Iterator[Located]:
        """Yield the rows; those of `dataset.eval_path` use the same vocabulary and another seed."""
        import numpy as np  # local import: a sweep checks its sources before heavy imports

        config = self.config
        letters = np.random.default_rng(config.seed).integers(
            97, 123, (_WORDS + config.classes, _LETTERS), dtype=np.uint8
        )
        labels, words = np.split(np.array([bytes(word).decode() for word in letters]), [config.classes])
        draw = np.random.default_rng([config.seed, 1 + self.key.endswith("eval_path")])
        shortest = config.length if config.shortest is None else config.shortest
        zipf = 1 / np.arange(1, config.length - shortest + 2)
        ends = np.cumsum(zipf / zipf.sum())[:-1]  # of the probabilities of the lengths
        for index in range(config.rows):
            label = str(labels[index % config.classes])
            if config.lengths == "zipf":
                count = shortest + int(np.searchsorted(ends, draw.random(), "right"))
            else:
                count = config.length if config.shortest is None else int(draw.integers(shortest, config.length + 1))
            text = " ".join([label, *words[draw.integers(_WORDS, size=count - 1)]])
            yield f"random row {index}", {"text": text} | ({"label": label} if self.labeled else {})

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(("random rows 1", self.key.endswith("eval_path"), self.config)).encode()).hexdigest()


# ---- split files


def files_of_splits(setting: str, place: Path, hub_config: str | None, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files of each split; empty if there is only one.

    Files without a split are `train` if there is no split of that name.
    """
    import yaml
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns, sanitize_patterns

    root = place.resolve()
    try:
        section = _read_me_section(setting, place, hub_config)
        base = glob.escape(str(root / section.get("data_dir", "")))
        data_files = section.get("data_files")
        patterns = sanitize_patterns(data_files) if data_files else get_data_patterns(base)
        matches = DataFilesDict.from_patterns(patterns, base_path=base)
    except EmptyDatasetError:
        return {}
    except (FileNotFoundError, ValueError, yaml.YAMLError) as error:
        raise DataError(
            f"{setting}: cannot get the splits from README.md or the file names: {first_line(error)}"
        ) from error
    by_path = {str(root / file.relative_to(place)): file for file in files}
    splits = {
        str(name): [by_path[path] for path in sorted(set(paths)) if path in by_path] for name, paths in matches.items()
    }
    splits = {name: paths for name, paths in splits.items() if paths}
    unclaimed = [file for file in files if not any(file in paths for paths in splits.values())]
    if splits and "train" not in splits and unclaimed and not section:
        splits["train"] = unclaimed
    return {} if set(splits) == {"train"} and not section else splits


def _read_me_section(setting: str, place: Path, hub_config: str | None) -> Mapping[str, Any]:
    """Return the `configs` section in README.md for the chosen configuration; empty if there is none."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import metadata_load

    card: Any = metadata_load(place / "README.md") if (place / "README.md").is_file() else None
    configs = MetadataConfigs.from_dataset_card_data(card or {})
    name = hub_config or configs.get_default_config_name()
    if configs and name not in configs:
        problem = f"dataset.hub_config={hub_config} is not one of them" if hub_config else "none is the default"
        raise DataError(
            f"{setting}: available configurations: {', '.join(configs)}, but {problem}. Choose one, e.g."
            f" dataset.hub_config={next(iter(configs))}"
        )
    return configs[name] if configs and name is not None else {}


# ---- sources


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SAVED_FILES = ("state.json", "dataset_info.json")  # of one split written by `save_to_disk`
_HASHED_BYTES = 1 << 20  # at each end of a file
_COMMIT = re.compile(r"[0-9a-f]{40}")
# of damaged files, which `datasets` wraps only if it stores the rows
_READER_ERRORS = (ValueError, TypeError, LookupError, NotImplementedError, EOFError, zlib.error, zipfile.BadZipFile)
_HUB_TIMEOUT_SECONDS = 10.0  # of the request that tests the connection to the hub; `datasets` retries for minutes


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of files, in name order."""

    name: str  # as typed by the user
    key: str  # `dataset.path` or `dataset.eval_path`
    files: tuple[tuple[Path, str], ...]  # with the name in locations
    left_out: tuple[str, ...] = ()  # files in the folder that are not read
    split: str = ""  # of a folder with splits
    other_splits: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list, compare=False)  # on files read so far

    def data_files(self) -> Iterator[DataFile]:
        return (DataFile(path, name, self.notes) for path, name in self.files)

    def rows(self) -> Iterator[Located]:
        for file in self.data_files():
            is_text = extension(file.path) in TEXT_FILES
            for location, row in self._rows(file):
                if is_text and isinstance(row, dict):
                    require_prose(file, row[TEXT_COLUMN])
                yield location, row

    def _rows(self, file: DataFile) -> Iterator[Located]:
        try:
            yield from read_file(file)
        except DataError as error:
            fix = "Fix the file:" if len(self.files) == 1 else "Fix the file, or leave it out of"
            # on a separate line, because a problem may end with a command
            raise DataError([f"{problem}\n    {fix} {self.key}={self.name}" for problem in error.problems]) from error

    def fingerprint(self) -> str:
        return files_hash(self.files)


@dataclass(frozen=True, slots=True)
class RemoteRows(FileRows):
    """Rows of files at an address, read in place. `files` has their names."""

    remote: tuple[RemoteFile, ...] = ()

    def data_files(self) -> Iterator[DataFile]:
        return (DataFile(Path(file.name), escaped(file.name), self.notes, file) for file in self.remote)

    def fingerprint(self) -> str:
        return _sha256([(file.name, file.version) for file in self.remote])


@dataclass(frozen=True)
class HubRows:
    """One split of a hub dataset, downloaded on first read; offline, from the local cache."""

    name: str
    key: str
    split: str
    hub_config: str | None
    revision: str | None
    left_out: tuple[str, ...] = ()
    other_splits: tuple[str, ...] = ()  # unknown before the download

    def rows(self) -> Iterator[Located]:
        for index, row in enumerate(
            named_tags(self._loaded.features, self._loaded)
        ):  # counted from 0, as in the viewer of the hub
            yield f"{self.name}[{self.split}] row {index}", row

    def fingerprint(self) -> str:
        return _sha256(self.name, self.split, self.hub_config, self._loaded._fingerprint)

    @cached_property
    def _loaded(self) -> Any:
        import datasets

        reason, _ = self._hub
        was_offline = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = bool(reason) or was_offline
        try:
            with self._explained(f"{reason}, and it is not in the local cache" if reason else ""):
                loaded = datasets.load_dataset(self.name, self.hub_config, split=self.split, revision=self.revision)
        finally:
            datasets.config.HF_HUB_OFFLINE = was_offline
        if reason and self.revision and not any(self.revision in f["filename"] for f in loaded.cache_files):
            raise self._problem(f"{reason}, and the local cache does not have revision {self.revision}")
        return loaded

    @contextmanager
    def _explained(self, cause: str = "", faults: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
        """Convert errors of `datasets` to user errors; `cause` replaces the message of a failed connection."""
        import datasets
        from huggingface_hub import errors as hub

        try:
            yield
        except (hub.HTTPError, OSError) as error:  # transport errors are not an OSError in every version
            raise self._problem(cause or first_line(error)) from error
        except (*faults, datasets.exceptions.DatasetsError) as error:  # the message lists splits or configurations
            settings = f"{self.key}={self.name} dataset.split={self.split} dataset.hub_config={self.hub_config}"
            raise DataError(f"{settings}: {first_line(error)}") from error

    @cached_property
    def _hub(self) -> tuple[str, str]:
        """Reason why the hub is unreachable, and otherwise the commit; raise if the dataset is missing or gated."""
        from huggingface_hub import HfApi
        from huggingface_hub import errors as hub

        try:
            info = HfApi().dataset_info(self.name, revision=self.revision, timeout=_HUB_TIMEOUT_SECONDS)
        except hub.GatedRepoError as error:
            page = f"https://huggingface.co/datasets/{self.name}"
            raise self._problem(f"gated: accept its terms at {page}") from error
        except hub.RevisionNotFoundError as error:
            raise self._problem(f"dataset.revision={self.revision} is not on the hub") from error
        except hub.RepositoryNotFoundError as error:
            raise self._problem("not on the hub, or private") from error
        except hub.OfflineModeIsEnabled:
            return "offline (HF_HUB_OFFLINE is set)", ""
        except (hub.HTTPError, OSError) as error:  # see _explained
            return f"the hub cannot be reached ({first_line(error)})", ""
        return "", str(info.sha)

    def _problem(self, cause: str) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"{self.key}={self.name}: {cause}. For a gated or private dataset, set HF_TOKEN to a token with"
            f" read access (https://huggingface.co/settings/tokens); or download it and set {self.key}=FILE"
        )


@dataclass(frozen=True)
class StreamedRows(HubRows):
    """One split of a hub dataset at one commit, read over the network each time; no local copy of the rows."""

    def rows(self) -> Iterator[Located]:
        from huggingface_hub import errors as hub

        with self._explained(faults=_READER_ERRORS):
            try:
                yield from super().rows()
            except (hub.HTTPError, OSError) as error:
                cause = f"could not be streamed ({first_line(error)}). To retry, run the same command again"
                raise ConnectionError(cause) from error

    def fingerprint(self) -> str:
        is_commit = self.revision and _COMMIT.fullmatch(self.revision)
        commit = self.revision if is_commit else self._commit  # cached tokens of a commit do not need the hub
        return _sha256("streamed", self.name, self.split, self.hub_config, commit, version("datasets"))

    @property
    def _commit(self) -> str:
        reason, commit = self._hub
        if reason:
            raise self._problem(f"{reason}, and dataset.streaming=true keeps no local copy of the rows")
        return commit

    @cached_property
    def _loaded(self) -> Any:
        import datasets

        commit = self._commit
        stream = datasets.load_dataset(self.name, self.hub_config, split=self.split, revision=commit, streaming=True)
        if stream.features is None:  # inferred from each part of a file, so values would depend on their neighbors
            raise DataError(
                f"dataset.streaming=true: {self.key}={self.name} has files without column types, such as CSV or a JSON"
                " array. Set dataset.streaming=false"
            )
        return stream


@dataclass(frozen=True)
class SavedRows:
    """One split of a folder written by `save_to_disk`."""

    name: str
    key: str
    folder: Path
    split: str
    left_out: tuple[str, ...] = ()

    @property
    def other_splits(self) -> tuple[str, ...]:
        names = self.folder / "dataset_dict.json"
        splits = json.loads(names.read_text("utf-8"))["splits"] if names.is_file() else []
        return tuple(name for name in splits if name != self.split)

    def rows(self) -> Iterator[Located]:
        import datasets

        try:
            loaded = datasets.load_from_disk(str(self.folder))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.key}={self.name}: cannot be read: {first_line(error)}") from error
        shown = self.name
        if isinstance(loaded, datasets.DatasetDict):
            if self.split not in loaded:
                splits = ", ".join(sorted(loaded))
                raise DataError(f"{self.key}={self.name}: no dataset.split={self.split}; splits: {splits}")
            loaded, shown = loaded[self.split], f"{self.name}[{self.split}]"
        for index, row in enumerate(named_tags(loaded.features, loaded)):
            yield f"{shown} row {index}", row

    def fingerprint(self) -> str:
        files = [file for file in sorted(self.folder.rglob("*")) if file.is_file()]
        content = files_hash((file, file.relative_to(self.folder).as_posix()) for file in files)
        return _sha256(self.name, self.split, content)


# Rows in a fixed order with their locations, and a fingerprint that changes if they may have changed.
Source = FileRows | HubRows | SavedRows | RandomRows


def check(config: DatasetConfig, *, training: bool = True) -> list[str]:
    """Return the problems of `dataset.transform` and of the paths, without reading rows.

    For an evaluation, only the paths that it reads are checked.
    """
    sections = sources_of(config) if training or config.eval_path is None else {}
    training_sources = [
        partial(train_source, section, name) for name, section in sections.items() if section.path is not None
    ]
    transform = partial(transform_of, config)
    openings: list[Callable[[], Any]] = [transform, *training_sources, partial(eval_source, config)]
    problems: list[str] = []
    for opening in openings:
        try:
            opening()
        except (ConfigError, DataError, EnvironmentProblem) as error:
            problems += error.problems
    return list(dict.fromkeys(problems))


def train_source(config: DatasetConfig, name: str = "") -> Source:
    """Return the rows of `dataset.path`; in a mix, of the source `name`."""
    assert config.path is not None, "a mix is opened source by source"
    return open_source(config.path, f"{key_of(name)}.path", config, config.split)


def eval_source(config: DatasetConfig) -> Source | None:
    """Return the eval rows in the config, or None."""
    if config.eval_path is not None:
        return open_source(config.eval_path, "dataset.eval_path", config, None)
    if config.eval_split is None or config.path is None:
        return None
    source = open_source(config.path, "dataset.path", config, config.eval_split)
    if isinstance(source, FileRows | RandomRows) and not source.split:
        raise DataError(
            f"dataset.eval_split={config.eval_split}: dataset.path={config.path} has no splits; set"
            " dataset.eval_path=FILE or dataset.eval_fraction instead"
        )
    return source


def unread_splits(config: DatasetConfig) -> Iterator[str]:
    """Yield a note for each source with splits that are neither trained nor evaluated."""
    for name, section in sources_of(config).items():
        source = train_source(section, name)
        others = [split for split in source.other_splits if split != config.eval_split]
        if others:
            first = "validation" if "validation" in others else others[0]
            how = f" (dataset.eval_split={first} dataset.eval_fraction=0 evaluates on {first})" if not name else ""
            yield f"{source.key}={source.name}: splits not read: {', '.join(others)}{how}"


def files_hash(files: Iterable[tuple[Path, str]]) -> str:
    """Hash the shown name, size, modification time, and first and last megabyte of each file."""
    digest = hashlib.sha256()
    for path, name in files:
        with open_file(path) as stream:
            status = os.fstat(stream.fileno())
            digest.update(f"{name}\0{status.st_size} {status.st_mtime_ns}\n".encode())
            digest.update(stream.read(_HASHED_BYTES))
            stream.seek(max(0, status.st_size - _HASHED_BYTES))
            digest.update(stream.read(_HASHED_BYTES))
    return digest.hexdigest()


def open_source(path: str, key: str, config: DatasetConfig, split: str | None) -> Source:
    """Open one split; for a folder of files, all files if `split` is None."""
    if path == RANDOM:
        return RandomRows(path, key, config.random, labeled=config.format in ("auto", *LABELED_FORMATS))
    if is_remote(path):
        return _at_address(path, key)
    place = Path(locate(path)).expanduser()
    if _is_hub_id(path):
        is_other = key == "dataset.eval_path" and path != config.path  # the revision is only for dataset.path
        rows = StreamedRows if config.streaming else HubRows
        return rows(path, key, split or config.split, config.hub_config, None if is_other else config.revision)
    if (place / "dataset_dict.json").is_file() or all((place / name).is_file() for name in _SAVED_FILES):
        return SavedRows(path, key, place, split or config.split)
    return _local_files(path, place, key, config, split)


def _local_files(path: str, place: Path, key: str, config: DatasetConfig, split: str | None) -> FileRows:
    if place.is_dir():
        return _folder(path, place, key, config, split)
    if place.is_file():
        return FileRows(path, key, ((_readable(place, key), escaped(place.name)),))
    if place.exists():
        raise DataError(
            f"{key}={path}: is a device or a pipe, which cannot be read twice; write the rows to a file: cat {path}"
            " > rows.jsonl"
        )
    if glob.has_magic(path):
        return _matches(path, place, key)
    raise DataError(_missing(path, place, key))


def _at_address(path: str, key: str) -> RemoteRows:
    remote = remote_files(path, key)
    files = tuple((_readable(Path(file.name), key), escaped(file.name)) for file in remote)
    return RemoteRows(path, key, files, remote=remote)


def _is_hub_id(path: str) -> bool:
    """Return whether the path is `org/name`, unless it is more likely a local file or folder."""
    place = Path(path)
    if _HUB_ID.fullmatch(path) is None or place.exists() or extension(place) in READERS:
        return False
    return not place.parent.exists()


def _readable(path: Path, key: str) -> Path:
    if extension(path) not in READERS:
        hint = f"supported: {' '.join(READERS)} (text formats also with .gz or .zst)"
        if program := TAGGED_FILES.get(extension(path)):
            command = DataFile(path, path.name).converted(program, ".jsonl")
            hint = f"to convert its words and tags to rows for task=tokens, type: {command}"
        raise DataError(f"{key}={path}: unsupported file type; {hint}")
    return path


def _matches(path: str, place: Path, key: str) -> FileRows:
    """Return the files that match a pattern; all must have a supported type."""
    root = place
    while glob.has_magic(str(root)):
        root = root.parent
    matches = sorted(match for match in root.glob(str(place.relative_to(root))) if match.is_file())
    files = [file for file in matches if not _is_hidden(file.relative_to(root))]
    if not files:
        raise DataError(f"{key}={path}: no file matches the pattern")
    return FileRows(path, key, _with_names([_readable(file, key) for file in files], root))


def _is_hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)


def _with_names(files: Iterable[Path], root: Path) -> tuple[tuple[Path, str], ...]:
    return tuple((file, escaped(file.relative_to(root).as_posix())) for file in files)


def _folder(path: str, place: Path, key: str, config: DatasetConfig, split: str | None) -> FileRows:
    """Return all supported files of a split; text files next to tables are ignored unless the format is text."""
    files = [file for file in sorted(place.rglob("*")) if file.is_file() and not _is_hidden(file.relative_to(place))]
    readable = [file for file in files if extension(file) in READERS]
    tables = [file for file in readable if extension(file) not in TEXT_FILES]
    if not readable:
        raise DataError(f"{key}={path}: no supported file in the folder; supported: {' '.join(READERS)}")
    if tables and len(tables) < len(readable) and config.format == "text":
        raise DataError(
            f"{key}={path}: contains text files and tables; choose with a pattern, e.g. {key}='{path}/*.txt'"
        )
    # a compressed file is skipped if it is also there uncompressed
    packed = {file for file in readable if file.suffix.lower() in PACKED_FILES and file.with_suffix("").is_file()}
    chosen = [file for file in tables or readable if file not in packed]
    splits = {} if split is None else files_of_splits(f"{key}={path}", place, config.hub_config, chosen)
    if split is None or not splits:
        return FileRows(path, key, _with_names(chosen, place), _left_out(files, chosen, place))
    if split not in splits:
        raise DataError(
            f"{key}={path}: no split {split}; splits: {', '.join(splits)}. Set dataset.split for the training"
            " rows, dataset.eval_split for the eval set"
        )
    others = tuple(name for name in splits if name != split)
    left_out = _left_out(files, [file for paths in splits.values() for file in paths], place)
    return FileRows(path, key, _with_names(splits[split], place), left_out, split, others)


def _left_out(files: Iterable[Path], read: Iterable[Path], root: Path) -> tuple[str, ...]:
    """Return the names of files that are not read, except README.md."""
    read_files = {*read}
    others = [file for file in files if file not in read_files and file.name != "README.md"]
    return tuple(name for _, name in _with_names(others, root))


def _missing(path: str, place: Path, key: str) -> str:
    message = f"{key}={path}: no such file or folder"
    if not place.is_absolute():
        message += f" in {Path.cwd()}"
    siblings = [entry.name for entry in place.parent.iterdir()] if place.parent.is_dir() else []
    near = difflib.get_close_matches(place.name, siblings, n=3)
    if near:
        message += f"; did you mean {' or '.join(str(Path(path).with_name(name)) for name in near)}?"
    if not extension(place):
        message += "; a hub dataset is ORG/NAME, and no local folder ORG may exist"
    return message


def _sha256(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()
