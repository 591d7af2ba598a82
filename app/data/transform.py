"""`dataset.transform`: a function of the user that changes or drops each row before its columns get roles."""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

from app.config.schema import DatasetConfig
from app.config.validate import did_you_mean
from app.data.rows import Broken, Located, Row, escaped, kind_of
from app.errors import ConfigError, gist


@dataclass(frozen=True, slots=True)
class Origin:
    """Function of `dataset.transform`: its name, the hash of its source files, and its package with the version."""

    name: str
    source: str
    package: str | None  # None: a module outside of installed packages


@dataclass(frozen=True, slots=True)
class Transform:
    """Function of `dataset.transform` with its origin."""

    function: Callable[[Row], Any]
    origin: Origin

    def rows(self, rows: Iterator[Located], count_dropped: Callable[[], None]) -> Iterator[Located]:
        """Yield the rows that the function returns; an exception, or another type of result, is a bad row."""
        for location, row in rows:
            result = row if isinstance(row, Broken) else self._of_row(row)
            if result is None:
                count_dropped()
            else:
                yield location, result

    def _of_row(self, row: Row) -> Row | Broken | None:
        named = f"dataset.transform={self.origin.name}"
        try:
            result = self.function(row)
        except Exception as error:  # noqa: BLE001  code of the user
            return Broken(escaped(f"{named} raised {type(error).__name__}: {gist(error)}"))
        if result is None or (isinstance(result, dict) and all(isinstance(name, str) for name in result)):
            return result
        kind = "an object with keys that are no text" if isinstance(result, dict) else kind_of(result)
        return Broken(f"{named} returned {kind}; return a dict with column names as keys, or None to drop the row")


def transform_of(config: DatasetConfig) -> Transform | None:
    """Return the function of the config; ConfigError if its module or its name does not exist."""
    return None if config.transform is None else _load(config.transform)


def origin_of(config: DatasetConfig) -> dict[str, str | None] | None:
    """Return the facts that determine the result of `dataset.transform`; None without one."""
    transform = transform_of(config)
    return None if transform is None else asdict(transform.origin)


def transform_hash(config: DatasetConfig) -> str:
    """Return the hash of these facts; `none` without a transform."""
    origin = origin_of(config)
    return "none" if origin is None else hashlib.sha256(repr(sorted(origin.items())).encode()).hexdigest()


@cache
def _load(name: str) -> Transform:
    setting = f"dataset.transform={name}"
    place, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # the console script does not search the current folder
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise ConfigError(f"{setting}: {place} needs the module {error.name}, which is not installed.") from error
        raise ConfigError(
            f"{setting}: no module {error.name} in {here} or among the installed packages. Create {error.name}.py"
            " there, or install its package."
        ) from error
    except Exception as error:  # code of the user
        raise ConfigError(f"{setting}: importing {place} raised {type(error).__name__}: {gist(error)}") from error
    functions = {key: inner for key, inner in vars(module).items() if isinstance(inner, FunctionType)}
    if attribute not in functions:
        raise ConfigError(
            f"{setting}: {module.__file__} has no function {attribute}.{did_you_mean(attribute, functions)}"
        )
    function = functions[attribute]
    files = sorted({str(module.__file__), str(inspect.getsourcefile(inspect.unwrap(function)))})
    source = hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest()
    return Transform(function, Origin(name, source, _package_of(place)))


def _package_of(module: str) -> str | None:
    """Return the installed package of a module with its version."""
    packages = metadata.packages_distributions().get(module.partition(".")[0], [])
    return f"{packages[0]} {metadata.version(packages[0])}" if packages else None
