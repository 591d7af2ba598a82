"""Files of object stores and of the hub (`s3://`, `gs://`, `hf://`), read in place by fsspec."""

import glob
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from app.errors import DataError, EnvironmentProblem, first_line

_MARK = "://"
_BUFFER_BYTES = 1 << 20
# by protocol: the package that reads it, and where that package finds credentials
_PROTOCOLS = {
    "s3": ("s3fs", "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "gs": ("gcsfs", "GOOGLE_APPLICATION_CREDENTIALS"),
    "hf": ("huggingface_hub", "HF_TOKEN"),
    "memory": ("fsspec", "nothing"),  # of this process
}
# keys of `info` that change with the content, the first that a file system has; otherwise all of them together
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "blob_id", "xet_hash")

Result = TypeVar("Result")


def is_remote(path: str) -> bool:
    """Return whether a path is an address such as s3://bucket/rows.jsonl."""
    return _MARK in path


def install_command(package: str) -> str:
    """Return the command that installs a package of fsspec, whose version is that of fsspec, which datasets limits."""
    return f"pip install {package}=={version('fsspec')}"


def without_folders(path: str) -> str:
    """Return the file name of an address; a local path unchanged."""
    return path.rpartition("/")[2] if is_remote(path) else path


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File at an address. `version` changes if its content does."""

    name: str  # in messages: the name of the file, or the part of its path that a pattern matches
    path: str  # for the file system
    version: str
    _of: "_FileSystem" = field(compare=False)

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Open the file for reading; a failure of the store is an EnvironmentProblem."""
        stream = self._of.call(lambda files: files.open(self.path, "rb"))
        raw: Any = _Raw(stream, self._of)
        with stream, io.BufferedReader(raw, _BUFFER_BYTES) as reader:
            yield reader


def remote_files(path: str, key: str) -> tuple[RemoteFile, ...]:
    """Return the file at an address, or all files that its pattern matches, in name order."""
    protocol = path.partition(_MARK)[0]
    if protocol not in _PROTOCOLS:
        raise DataError(
            f"{key}={path}: {protocol}:// is not supported. Use s3://, gs:// or hf://, or download the file and set"
            f" {key}=FILE"
        )
    if "@" in urlsplit(path).netloc:
        raise DataError(
            f"{key}: an address with a password or key in it is not accepted, because run.yaml would store it. Set"
            f" {_PROTOCOLS[protocol][1]} instead"
        )
    system = _FileSystem(f"{key}={path}", protocol)
    whole = str(system.call(lambda files: files._strip_protocol(path)))
    if not glob.has_magic(whole):
        return (system.file(whole, PurePosixPath(whole).name),)
    root = whole[: min(whole.find(sign) for sign in "*?[" if sign in whole)].rpartition("/")[0]
    names = [name for name in system.call(lambda files: files.glob(whole)) if system.is_file(name)]
    if not names:
        raise DataError(f"{key}={path}: no file matches the pattern")
    return tuple(system.file(name, name.removeprefix(f"{root}/")) for name in sorted(names))


@dataclass(frozen=True, slots=True)
class _FileSystem:
    """File system of a protocol, whose errors become messages about a setting."""

    setting: str
    protocol: str

    def call(self, action: Callable[[Any], Result]) -> Result:
        """Return the result of an action of fsspec; each store has errors of its own."""
        package, credentials = _PROTOCOLS[self.protocol]
        try:
            import fsspec  # slow to import

            return action(fsspec.filesystem(self.protocol))
        except ImportError as error:
            raise EnvironmentProblem(
                f"{self.setting}: {self.protocol}:// needs the package {package}. Install it:"
                f" {install_command(package)}"
            ) from error
        except FileNotFoundError as error:
            raise DataError(
                f"{self.setting}: no such file. If it is private, set {credentials} (read by {package})"
            ) from error
        except Exception as error:  # those of botocore, aiohttp and others have no common class
            reason = first_line(error) or type(error).__name__
            raise EnvironmentProblem(
                f"{self.setting}: cannot be read ({reason}). For credentials, set {credentials} (read by {package})"
            ) from error

    def is_file(self, path: str) -> bool:
        return bool(self.call(lambda files: files.isfile(path)))

    def file(self, path: str, name: str) -> RemoteFile:
        """Return a file with its version; DataError if it is a folder."""
        info = self.call(lambda files: files.info(path))
        if info["type"] != "file":
            raise DataError(f"{self.setting}: is a folder. Choose its files by a pattern, e.g. {path}/*.jsonl")
        checksum = next((info[key] for key in _CHECKSUMS if info.get(key)), None)
        version = checksum or self.call(lambda files: files.ukey(path))
        return RemoteFile(name, path, f"{info['size']} {version}", self)


class _Raw(io.RawIOBase):
    """Stream of a store for io.BufferedReader."""

    def __init__(self, stream: Any, system: _FileSystem) -> None:
        self._stream, self._system = stream, system

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._system.call(lambda _files: self._stream.readinto(buffer)))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())
