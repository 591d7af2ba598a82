"""What `dataset.path` names: files, a folder of them, a saved dataset, a hub id. Imports nothing heavy."""

import difflib
import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.assets import locate
from app.config.dataset import key_of, sources_of
from app.config.schema import DatasetConfig
from app.data.cache_key import files_hash
from app.data.hub import HubRows, SavedRows, is_saved_dataset
from app.data.readers import READERS, TEXT_FILES, extension, read_file
from app.data.shapes import Located, Source, printable
from app.errors import DataError

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
