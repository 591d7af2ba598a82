"""Atomic writes of files and folders, with disk errors reported as user errors, and checksums."""

import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from app.errors import CheckpointError, EnvironmentProblem

CHECKSUMS = "manifest.json"
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py")  # files that a model is loaded from
_SHA256 = re.compile(r"[0-9a-f]{64}")
# errors that keep a file from growing: cause and fix
_FULL_DISKS = {
    errno.ENOSPC: ("the disk is full", "Free disk space"),
    errno.EDQUOT: ("the disk quota is used up", "Free disk space"),
    errno.EFBIG: ("file size limit of the shell exceeded", "Type ulimit -f unlimited"),
}
# disk errors; other errors in code that does more than write may be bugs
DISK_ERRORS = frozenset({*_FULL_DISKS, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ESTALE, errno.EBUSY})
# file systems whose files have one mode, as mounts of object stores
_NO_MODE_SUPPORT = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP})
_TEMP_DIR_PREFIX = ".writing-"
STATE, SAVE_NUMBER = "state.json", "save"  # file in a checkpoint, and its key with the save number in the run
RESUMED = "resumed.json"  # next to checkpoints: the checkpoint last resumed with `resume=PATH`, and its save number
CHECKPOINT_NAME = re.compile(r"step-([0-9]{6,})$")
_MAX_JSON_BYTES = 256 << 20  # for untrusted files


@contextmanager
def report_write_errors(target: Path, errors: Container[int] | None = None) -> Iterator[None]:
    """Convert a system error to a user error about `target` that says how to resume the run.

    `errors`: the error numbers to report; all by default.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as fault:
        error = os_error_of(fault)
        if error is None or (errors is not None and error.errno not in errors):
            raise
        raise EnvironmentProblem(_explanation(error, target)) from fault


def _explanation(error: OSError, target: Path) -> str:
    # checkpoints of the run that the target belongs to
    saves = checkpoints_in(target.parent) or checkpoints_in(target.parent / "checkpoints")
    newest = saves[-1] if saves else None
    full = _FULL_DISKS.get(error.errno or 0)
    if full is None:
        hint = f". Earlier checkpoints are intact: resume with resume={newest}" if newest else ""
        why = error.strerror or error
        return f"output_dir: cannot write {target} ({why}); choose a writable output_dir{hint}"
    cause, remedy = full
    if newest is None:
        hint = f"Nothing was saved yet. {remedy} and start again, or choose an output_dir on another disk."
    else:
        hint = (
            f"Earlier checkpoints are intact. {remedy} and resume with resume=auto, or on another disk with "
            f"output_dir=DIR resume={newest}."
        )
    return f"{cause}: {target} could not be written. {hint}"


def os_error_of(fault: BaseException) -> OSError | None:
    """Return the system error of a failed write, even if wrapped by safetensors, a torch archive or numpy."""
    if isinstance(fault, SafetensorError):
        number = re.search(r"\(os error (\d+)\)", str(fault))
        return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None
    if isinstance(fault, RuntimeError) and re.search("inline_container|PytorchStreamWriter", str(fault)):
        before = fault.__context__  # the underlying file failed first
        return before if isinstance(before, OSError) else OSError(errno.EIO, os.strerror(errno.EIO))
    if isinstance(fault, OSError) and re.search(r"\d+ requested and \d+ written", str(fault)):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # numpy's tofile, which drops the error number
    return fault if isinstance(fault, OSError) else None


def is_disk_full(fault: BaseException) -> bool:
    """Return whether a file could not grow."""
    error = os_error_of(fault)
    return error is not None and error.errno in _FULL_DISKS


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a run in the order in which they were saved."""
    matches = [(CHECKPOINT_NAME.match(save.name), save) for save in folder.glob("step-*") if save.is_dir()]
    later = {name: at for name, at in read_object(folder / RESUMED).items() if isinstance(at, int)}
    named = [(max(save_number(save), later.get(save.name, 0)), int(name[1]), save) for name, save in matches if name]
    return [save for _, _, save in sorted(named)]


def next_save_number(folder: Path) -> int:
    """Return the number of the next save in a folder."""
    return 1 + max((int(number) for number in map(save_number, folder.glob("step-*")) if number != math.inf), default=0)


def save_number(save: Path) -> float:
    """Return the number of a checkpoint among all saves of its run, which may have returned to earlier steps.

    0 for checkpoints of old versions; infinity for damaged ones, so that they are not skipped silently.
    """
    try:
        state = read_json(save / STATE)
        number = state.get(SAVE_NUMBER, 0) if state["progress"] else math.inf
    except (OSError, LookupError, TypeError, ValueError, AttributeError):
        return math.inf
    return number if isinstance(number, int) else math.inf


def write_text(path: Path, text: str) -> None:
    """Replace the file atomically and sync it to disk."""
    partial = path.with_name(f".{path.name}.partial")
    with report_write_errors(path):
        try:
            partial.unlink(missing_ok=True)
            with partial.open("x", encoding="utf-8", errors="backslashreplace") as file:  # "x" follows no link
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            fsync(path.parent)
        except BaseException:  # Ctrl-C too
            with suppress(OSError):
                partial.unlink()
            raise


def is_partial(name: str) -> bool:
    """Return whether the name is that of a file left by a killed `write_text`."""
    return name.startswith(".") and name.endswith(".partial")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON with `write_text`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise ValueError if it is damaged, nested too deep, too large or no file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file")
    if status.st_size > _MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {_MAX_JSON_BYTES >> 20} MB")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as fault:
        raise ValueError("it is nested too deep") from fault


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing, damaged or has another type."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def append_text(path: Path, text: str) -> None:
    """Append without a buffer, so that nothing is lost if the process is killed."""
    # lone surrogates in user data become JSON escapes again
    remaining = text.encode("utf-8", "backslashreplace")
    with report_write_errors(path), io.FileIO(path, "a") as file:
        while remaining:
            remaining = remaining[file.write(remaining) :]


def fsync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temp_dir_of(target: Path) -> Path:
    """Return the folder next to `target` in which its content is prepared."""
    return target.with_name(_TEMP_DIR_PREFIX + target.name)


@contextmanager
def atomic_folder(target: Path, seal: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` after `seal` has synced it; remove it on any error.

    All files get the mode of the umask: safetensors writes them for the owner only.
    """
    temp_dir = temp_dir_of(target)
    shutil.rmtree(temp_dir, ignore_errors=True)
    try:
        temp_dir.mkdir(parents=True)
        yield temp_dir
        for file in files_in(temp_dir):
            _set_mode(file, temp_dir.stat().st_mode & 0o666)
        seal(temp_dir)
        if target.exists():
            shutil.rmtree(target)
        temp_dir.rename(target)
        fsync(target.parent)
    except BaseException:  # Ctrl-C too
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise


def _set_mode(file: Path, mode: int) -> None:
    try:
        file.chmod(mode)
    except OSError as fault:
        if fault.errno not in _NO_MODE_SUPPORT:
            raise


@contextmanager
def checksummed_folder(target: Path) -> Iterator[Path]:
    """Write a folder atomically, with checksums for `verify_checksums`."""
    with report_write_errors(target, DISK_ERRORS), atomic_folder(target, _write_checksums) as temp_dir:
        yield temp_dir


def verify_checksums(folder: Path, read: Iterable[str] = ()) -> str | None:
    """Return the first file that is missing or has changed, with the reason; None if there is none.

    Files that match a pattern of `read` must have a checksum; others may be added. A model card may be edited.
    """
    try:
        hashes = read_json(folder / CHECKSUMS)
    except FileNotFoundError:
        return f"{CHECKSUMS} is missing"
    except (OSError, ValueError):
        return f"{CHECKSUMS} cannot be read"
    if not isinstance(hashes, dict):
        return f"{CHECKSUMS} cannot be read"
    for name, expected in hashes.items():
        if name.endswith(".md"):
            continue
        file = folder / name
        is_there = os.path.isfile(file)  # noqa: PTH113 (Path.is_file raises for a name that is too long)
        if ".." in Path(name).parts or not file.is_relative_to(folder) or not is_there:
            return f"{name} is missing"
        if sha256(file) != expected:
            return f"{name} has changed since it was written"
    read_files = {str(file.relative_to(folder)) for pattern in read for file in folder.glob(pattern)}
    unknown = min(read_files - {*hashes, CHECKSUMS}, default=None)
    return None if unknown is None else f"{unknown} is not in {CHECKSUMS}"


def require_intact(folder: Path, remedy: str, read: Iterable[str] = MODEL_FILES, *, sealed: bool = True) -> None:
    """Raise an error if a file in a folder has changed since it was written; see `verify_checksums`.

    `sealed=False` accepts folders of other programs, which have no checksums.
    """
    if not sealed:
        hashes = read_object(folder / CHECKSUMS)
        if not hashes or not all(isinstance(value, str) and _SHA256.fullmatch(value) for value in hashes.values()):
            return
    damage = verify_checksums(folder, read) if folder.is_dir() else "the folder is missing"
    if damage:
        raise CheckpointError(f"{folder}: {damage}. {remedy}")


def is_own_file(path: Path) -> bool:
    """Return whether a file exists and is not a link, which in an untrusted folder may point to any file."""
    return path.is_file() and not path.is_symlink()


def delete_folder(folder: Path) -> str | None:
    """Delete a folder that is no longer needed; return a note if that fails."""
    try:
        shutil.rmtree(folder)
    except OSError as fault:
        return f"{folder} cannot be deleted ({fault.strerror or fault}); it is no longer needed"
    return None


def remove_temp_dirs(folder: Path) -> None:
    """Remove the temporary folders of killed processes."""
    for temp_dir in folder.glob(f"{_TEMP_DIR_PREFIX}*"):
        if temp_dir.is_dir():
            shutil.rmtree(temp_dir, ignore_errors=True)
        else:
            temp_dir.unlink(missing_ok=True)


def files_in(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders."""
    return sorted(file for file in folder.rglob("*") if file.is_file())


def irregular_files(folder: Path) -> list[Path]:
    """Return the pipes, sockets and devices in an untrusted folder, because reading them may block forever."""
    return sorted(path for path in folder.iterdir() if path.exists() and not (path.is_file() or path.is_dir()))


def fsync_all(folder: Path) -> None:
    """Sync a folder and its content to disk."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)


def _write_checksums(folder: Path) -> None:
    hashes = {str(file.relative_to(folder)): sha256(file) for file in files_in(folder)}
    (folder / CHECKSUMS).write_text(json.dumps(hashes, indent=1))
    fsync_all(folder)


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- what a file system must do


def require_file_operations(folder: Path) -> None:
    """Raise if the file system of a folder lacks an operation that saving needs, as mounts of object stores do."""
    probe = folder / ".probe.partial"  # ignored by the next start, like a partial file
    shutil.rmtree(probe, ignore_errors=True)
    operation = ""
    try:
        for operation, try_in in _SAVING.items():  # noqa: B007 (read after an error)
            try_in(probe)
    except OSError as fault:
        if fault.errno in _FULL_DISKS:
            raise
        raise EnvironmentProblem(
            f"output_dir={folder}: its file system cannot {operation} ({fault.strerror or fault}), which saving needs. "
            "Set output_dir to a folder on a local disk or a network file system; checkpoint.mirror=s3://... copies "
            "checkpoints to a bucket."
        ) from fault
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _append_twice(probe: Path) -> None:
    for text in ("a", "b"):
        with (probe / "file").open("a") as file:
            file.write(text)


def _replace_file(probe: Path) -> None:
    (probe / "new").write_text("c")
    (probe / "new").replace(probe / "file")


def _rename_folder(probe: Path) -> None:
    (probe / "old").mkdir()
    (probe / "old/file").write_text("d")
    (probe / "old").rename(probe / "renamed")


_SAVING: dict[str, Callable[[Path], object]] = {
    "create folders": Path.mkdir,
    "append to files": _append_twice,
    "replace files": _replace_file,
    "rename folders": _rename_folder,
    "sync files and folders": fsync_all,
    "delete folders": shutil.rmtree,
}
