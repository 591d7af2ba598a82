"""Copies of a run in an object store or on another disk (`checkpoint.mirror`), made by fsspec next to training.

A checkpoint is copied with its checksums last, so that `resume=auto` passes over one that was interrupted.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from app.config.schema import CheckpointConfig
from app.data.remote_files import install_command
from app.errors import ConfigError, gist
from app.files import CHECKPOINT_NAME, CHECKSUMS, files_in
from app.safe_text import redact_text

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}  # that have a file system for fsspec
_OPTIONS = {"file": {"auto_mkdir": True}}
_FOLDERS = ("checkpoints", "base", "reference", "start", "final")
_QUERY = re.compile(r"(\w+://[^\s?]*)\?\S*")  # of a signed URL in an error message


def check(config: CheckpointConfig) -> Iterator[str]:
    """Yield the problem of a mirror whose package is not installed."""
    scheme = (config.mirror or "").partition("://")[0]
    package = _PACKAGES.get(scheme)
    if package is not None and find_spec(package) is None:
        yield (
            f"checkpoint.mirror={scheme}://... needs the package {package}, which is not installed: "
            f"{install_command(package)}, or remove checkpoint.mirror"
        )


class Mirror:
    """The copy of one output folder, in `url`/NAME. A failed copy is a remark and is tried again later."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = f"{url.rstrip('/')}/{folder.name}"
        self._folder = folder
        self._copied: dict[Path, tuple[int, int]] = {}  # files of this start: time of the last change, bytes
        self._thread: Thread | None = None
        self._remarks: list[str] = []
        self._said: set[str] = set()

    def require_own(self, checkpoint: Path | None) -> None:
        """Raise if the mirror has checkpoints of a run that this start does not resume: they would be replaced."""
        if checkpoint is not None and checkpoint.resolve().parent == (self._folder / "checkpoints").resolve():
            return
        try:
            files, root = self._opened()
            has_run = bool(_checkpoints(files, root))
        except Exception as fault:  # noqa: BLE001  each file system has other exceptions
            self._note(fault)
            return
        if has_run:
            raise ConfigError(
                f"checkpoint.mirror: {self.url} has checkpoints that are not in output_dir={self._folder}. To resume "
                "them, copy them back as in docs/clusters.md, or choose another output_dir."
            )

    def update(self) -> list[str]:
        """Copy what is new in the background, unless a copy is still running; return remarks on earlier copies."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._copy, name="mirror", daemon=True)
            self._thread.start()
        return self.remarks()

    def finish(self) -> list[str]:
        """Copy what is new, after the copy that is running; return remarks and whether the mirror is complete."""
        if self._thread is not None:
            self._thread.join()
        is_complete = self._copy()
        end = f"copied to {self.url}" if is_complete else f"checkpoint.mirror: {self.url} is not complete"
        return [*self.remarks(), end]

    def remarks(self) -> list[str]:
        """Return the failures that were not returned before, each cause once."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def _note(self, fault: Exception) -> None:
        cause = _QUERY.sub(r"\1", redact_text(gist(fault)))
        remark = f"checkpoint.mirror: copy to {self.url} failed ({cause}); training continues"
        if remark not in self._said:
            self._said.add(remark)
            self._remarks.append(remark)

    def _opened(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(self.url, **_OPTIONS.get(self.url.partition("://")[0], {}))
        files.invalidate_cache()
        return files, root

    def _copy(self) -> bool:
        try:
            files, root = self._opened()
            if not self._copied:
                self._skip_complete(files, root)
            for file in self._local_files():
                self._copy_file(files, root, file)
            for name in _checkpoints(files, root):
                if not (self._folder / "checkpoints" / name).is_dir():
                    files.rm(f"{root}/checkpoints/{name}", recursive=True)
        except Exception as fault:  # noqa: BLE001  each file system has other exceptions, and none may end the run
            self._note(fault)
            return False
        return True

    def _copy_file(self, files: Any, root: str, file: Path) -> None:
        try:
            status = _status(file)
            if self._copied.get(file) != status:
                files.put_file(str(file), f"{root}/{file.relative_to(self._folder).as_posix()}")
                self._copied[file] = status
        except FileNotFoundError:
            if file.exists():
                raise
            # an old checkpoint, which the run has just deleted

    def _local_files(self) -> list[Path]:
        """Return the files of the run without those that are being written, checksums of folders last."""
        files = []
        # os.walk passes over a folder that the run renames or deletes meanwhile
        for place, folders, names in os.walk(self._folder):
            is_top = Path(place) == self._folder
            folders[:] = [name for name in folders if (name in _FOLDERS if is_top else not _is_hidden(name))]
            files += [Path(place, name) for name in names if not _is_hidden(name)]
        return sorted(files, key=lambda file: (self._is_seal(file), file))

    def _is_seal(self, file: Path) -> bool:
        return file.name == CHECKSUMS and file.parent != self._folder

    def _skip_complete(self, files: Any, root: str) -> None:
        """Do not copy folders again that an earlier start has copied."""
        for checksums in filter(self._is_seal, self._local_files()):
            remote = f"{root}/{checksums.relative_to(self._folder).as_posix()}"
            with suppress(FileNotFoundError):  # a checkpoint that the run has just deleted
                if files.exists(remote) and files.cat_file(remote) == checksums.read_bytes():
                    self._copied |= {file: _status(file) for file in files_in(checksums.parent)}


def _checkpoints(files: Any, root: str) -> list[str]:
    folder = f"{root}/checkpoints"
    paths = files.ls(folder, detail=False) if files.exists(folder) else []
    names = [path.rstrip("/").rpartition("/")[2] for path in paths]
    return [name for name in names if CHECKPOINT_NAME.match(name)]


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is temporary, or a lock."""
    return name.startswith(".")


def _status(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size
