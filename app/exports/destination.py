"""Destination of an export: a folder that is written whole or not at all, or a hub repository. Imports no torch."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import ConfigError, EnvironmentProblem, gist
from app.files import atomic_folder, fsync_all, is_disk_full, read_object

REPORT = "export.json"


def require_target(given: str, target: Path) -> None:
    """Refuse a target that is not new or empty, unless it only has the report of a failed export."""
    if target.is_file():
        raise ConfigError(f"to={given}: this is a file. Give a new or empty folder.")
    names = sorted(file.name for file in target.iterdir()) if target.is_dir() else []
    has_only_failed_report = names == [REPORT] and read_object(target / REPORT).get("passed") is False
    if names and not has_only_failed_report:
        shown = ", ".join(names[:4])
        raise ConfigError(f"to={given}: the folder is not empty (it has {shown}). Give a new or empty folder.")
    place = existing_parent(target)
    if not os.access(place, os.W_OK):
        raise EnvironmentProblem(f"to={given}: {place} cannot be written to. Give another folder.")


@contextmanager
def atomic_export(target: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `target` when all of it is on the disk, and deleted on any error."""
    try:
        with atomic_folder(target, fsync_all) as folder:
            yield folder
    except BaseException as fault:
        if is_disk_full(fault):
            raise EnvironmentProblem(
                f"to={target}: the disk is full, nothing was exported. Free space, or give a folder on another disk."
            ) from fault
        if isinstance(fault, OSError) and fault.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise EnvironmentProblem(f"to={target}: cannot be written ({fault.strerror}).") from fault
        raise


def write_json_unflushed(path: Path, value: Any) -> None:
    """Write JSON into a folder that is fsynced as a whole later."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def existing_parent(target: Path) -> Path:
    """The nearest folder above `target` that exists."""
    return next(folder for folder in (target, *target.parents) if folder.exists())


# ---- hub


_OWN_BY_HUB = {".gitattributes"}
_WRITERS = ("admin", "write", "contributor")


@dataclass(frozen=True, slots=True)
class Repository:
    """The repository of `push=`, to which the user of the token in the environment may write."""

    name: str
    private: bool
    api: Any

    def push(self, folder: Path, message: str) -> str:
        """Make it hold what the folder holds; returns its address. What the hub has already is not sent again."""
        with _answered(self.name, f"The export is in {folder}, proven. To send it: hf upload {self.name} {folder}"):
            where = self.api.create_repo(self.name, private=self.private, exist_ok=True)
            self.api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message, delete_patterns=["*"])
        return str(where)


@contextmanager
def _answered(name: str, remedy: str) -> Iterator[None]:
    """Convert a refusal of the hub or the network, or an answer that is not the hub's, to a user error."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except (OfflineModeIsEnabled, HfHubHTTPError, HTTPError, ConnectionError) as fault:
        raise EnvironmentProblem(f"push={name}: {gist(fault)}. {remedy}.") from fault
    except (AttributeError, LookupError, TypeError, ValueError) as fault:  # of JSON that has other parts, or is none
        cause = f"the hub gave an unexpected answer ({type(fault).__name__}: {gist(fault)})"
        raise EnvironmentProblem(f"push={name}: {cause}. Check HF_ENDPOINT. {remedy}.") from fault


def repository(name: str, *, private: bool) -> Repository:
    """The repository, or a refusal: no name, no token, no right to write, or one that was not made by an export."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name.count("/") != 1:
        raise ConfigError(f"push={name}: not a repository name. Give push=USER/NAME.")
    try:
        validate_repo_id(name)
    except HFValidationError as fault:
        raise ConfigError(f"push={name}: not a repository name ({gist(fault)}). Give push=USER/NAME.") from fault
    if get_token() is None:
        raise ConfigError(f"push={name}: there is no token for the hub. Set HF_TOKEN, or log in: hf auth login.")
    api = HfApi()
    with _answered(name, "Set a token that may write (HF_TOKEN, or hf auth login), or leave push out"):
        user, (files, is_public) = _User.of(api.whoami()), _known(api, name)
    for problem in _problems(name, user, files, unasked=private and is_public):
        raise ConfigError(problem)
    return Repository(name, private, api)


@dataclass(frozen=True, slots=True)
class _User:
    """The owner of the token: what the token may do, and the role in each organization."""

    name: str
    may: str | None
    roles: dict[str, str | None]

    @classmethod
    def of(cls, answer: Any) -> "_User":
        roles = {each["name"]: each.get("roleInOrg") for each in answer.get("orgs", [])}
        return cls(answer["name"], answer.get("auth", {}).get("accessToken", {}).get("role"), roles)


def _known(api: Any, name: str) -> tuple[list[str], bool]:
    """The files of a repository that may not exist yet, and whether everyone may see them."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = api.model_info(name)
    except RepositoryNotFoundError:
        return [], False
    files = [each.rfilename for each in found.siblings or ()]
    return [each for each in files if each not in _OWN_BY_HUB], found.private is False


def _problems(name: str, user: _User, files: list[str], *, unasked: bool) -> Iterator[str]:
    """`unasked`: everyone may see the repository, and was not to."""
    place = name.partition("/")[0]
    if user.may == "read":
        yield f"push={name}: the token may only read. Give one that may write: HF_TOKEN, or hf auth login."
    if place != user.name and user.roles.get(place) not in _WRITERS:
        yield (f"push={name}: {user.name}, whose token this is, may not write to {place}. Give push={user.name}/NAME.")
    if files and REPORT not in files:
        yield (
            f"push={name}: this repository was not made by finetune export (it has {', '.join(sorted(files)[:3])}). "
            "Give another name: an export takes the place of all files."
        )
    if unasked:
        yield f"push={name}: this repository is public, so the export would be. Give private=false, or another name."
