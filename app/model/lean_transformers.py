"""transformers, which looks through its modules twice as it is imported; here once, and only at what it looks for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "transformers"
_LOOKS = f"{_NAME}.utils.import_utils"  # where it looks for the names that its modules export
_EXPORTS = "__all__"


def import_transformers() -> None:
    """Before anything else imports it.

    It reads some two thousand files, for the package and again for its models: it remembers what it has read by a path,
    and asks once by a Path and once by a string. Of each it takes all lines apart to find the last that begins with
    `__all__`. Together that is a tenth of a start.
    """
    if _NAME in sys.modules:
        return
    with _once_loaded(_LOOKS, _look_once):
        import transformers  # noqa: F401


def _look_once(looks: ModuleType) -> None:
    """What it finds stays what it is; a version that looks in another way is left as it is."""
    structure: Callable[[str], Any] | None = getattr(looks, "create_import_structure_from_path", None)
    names: Callable[[str], list[str]] | None = getattr(looks, "fetch__all__", None)
    if structure is not None:
        known = cache(structure)
        looks.create_import_structure_from_path = lambda module_path: known(_folder(Path(module_path)))  # type: ignore[attr-defined]
    if names is not None:
        looks.fetch__all__ = lambda file_content: names(_from_exports(file_content))  # type: ignore[attr-defined]


def _folder(path: Path) -> str:
    return str(path.parent if path.is_file() else path)


def _from_exports(text: str) -> str:
    """From the last line that begins with `__all__`, if there is one."""
    at = text.rfind(f"\n{_EXPORTS}")
    return text if at < 0 else text[at + 1 :]


@contextmanager
def _once_loaded(name: str, then: Callable[[ModuleType], None]) -> Iterator[None]:
    """A module that is imported inside is handed over as soon as it is there."""
    finder = _Watching(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Watching(MetaPathFinder):
    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """As Python would, for the one module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._watched(spec.loader.exec_module)  # type: ignore[assignment, method-assign]
        return spec

    def _watched(self, load: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def run(module: ModuleType) -> None:
            load(module)
            self._then(module)

        return run
