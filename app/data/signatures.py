"""Which content a file has, without reading it again: by what the file system says of it since it was hashed.

A signature is size, time of the last write, time of the last change of any kind, and inode. The third of them is set by
the kernel alone: content that changes changes the signature, also where the time of writing is put back.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from app.data.files import open_file

Signature = list[int]
Record = dict[str, Any]  # of the files of one folder, by name: signature and sha256
_SETTLED = 2 * 10**9  # nanoseconds: the coarsest times that file systems have


def signature(found: os.stat_result) -> Signature:
    """As JSON holds it."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


class KnownFiles:
    """Hashes of files with the signatures that they had, in `cache_dir`."""

    def __init__(self, cache_dir: str) -> None:
        self._place = Path(cache_dir).expanduser() / "hashes"

    def hash_all(self, files: Iterable[tuple[Path, str]]) -> str:
        """A hash of the files' bytes and of the names they go by; what has the signature that is known is not read."""
        digest = hashlib.sha256()
        records: dict[Path, Record] = {}
        changed = set()
        for path, name in files:
            folder = path.absolute().parent
            if folder not in records:
                records[folder] = self._read(folder)
            content, is_new = _hashed(path, records[folder])
            digest.update(f"{name}\0{content}\n".encode())
            if is_new:
                changed.add(folder)
        for folder in changed:
            self._keep(folder, records[folder])
        return digest.hexdigest()

    def _read(self, folder: Path) -> Record:
        try:
            record = json.loads(self._of(folder).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _keep(self, folder: Path, record: Record) -> None:
        """Renamed into place. Where nothing can be written, files are hashed anew each time."""
        place = self._of(folder)
        aside = place.with_name(f"{place.name}.{uuid.uuid4().hex[:12]}")
        there = {name: each for name, each in record.items() if (folder / name).exists()}
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(there), "utf-8")
            aside.replace(place)

    def _of(self, folder: Path) -> Path:
        return self._place / f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}.json"


def _hashed(path: Path, record: Record) -> tuple[str, bool]:
    """The sha256 of a file, and whether that is new to `record`."""
    with open_file(path) as stream:
        before = signature(os.fstat(stream.fileno()))
        known = record.get(path.name)
        if isinstance(known, dict) and known.get("signature") == before:
            return str(known["sha256"]), False
        content = hashlib.file_digest(stream, "sha256").hexdigest()
        same = signature(os.fstat(stream.fileno())) == before
    # A file that was written a moment ago may be written again without a change of its times: it is not known yet.
    if not same or time.time_ns() - max(before[1:3]) < _SETTLED:
        return content, False
    record[path.name] = {"signature": before, "sha256": content}
    return content, True
