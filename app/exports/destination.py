"""Destination of an export: a folder that is written atomically, or a hub repository. Imports no torch."""

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


def require_target(to: str, target: Path) -> None:
    """Raise if the target is neither new nor empty, unless it only has the report of a failed export."""
    if target.is_file():
        raise ConfigError(f"to={to}: this is a file. Set a new or empty folder.")
    names = sorted(file.name for file in target.iterdir()) if target.is_dir() else []
    has_only_failed_report = names == [REPORT] and read_object(target / REPORT).get("passed") is False
    if names and not has_only_failed_report:
        shown = ", ".join(names[:4])
        raise ConfigError(f"to={to}: the folder is not empty (found {shown}). Set a new or empty folder.")
    place = existing_parent(target)
    if not os.access(place, os.W_OK):
        raise EnvironmentProblem(f"to={to}: {place} is not writable. Set another folder.")


@contextmanager
def atomic_export(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is fsynced and renamed to `target`, or deleted on any error."""
    try:
        with atomic_folder(target, fsync_all) as folder:
            yield folder
    except BaseException as fault:
        if is_disk_full(fault):
            raise EnvironmentProblem(
                f"to={target}: the disk is full, nothing was exported. Free space, or set a folder on another disk."
            ) from fault
        if isinstance(fault, OSError) and fault.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise EnvironmentProblem(f"to={target}: could not be written ({fault.strerror}).") from fault
        raise


def write_json_unflushed(path: Path, value: Any) -> None:
    """Write JSON into a folder that is fsynced as a whole later."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def existing_parent(target: Path) -> Path:
    """Return the nearest existing folder of `target` and its parents."""
    return next(folder for folder in (target, *target.parents) if folder.exists())


# ---- hub


_CREATED_BY_HUB = {".gitattributes"}
_WRITERS = ("admin", "write", "contributor")


@dataclass(frozen=True, slots=True)
class Repository:
    """Repository of `push=`, writable with the token of the environment."""

    name: str
    private: bool
    api: Any

    def push(self, folder: Path, message: str) -> str:
        """Replace all files with those of `folder`, without uploading those the hub already has; return the URL."""
        with _report_hub_errors(
            self.name, f"The verified export is in {folder}. To upload it: hf upload {self.name} {folder}"
        ):
            url = self.api.create_repo(self.name, private=self.private, exist_ok=True)
            self.api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message, delete_patterns=["*"])
        return str(url)


@contextmanager
def _report_hub_errors(name: str, remedy: str) -> Iterator[None]:
    """Convert an error of the hub or the network, or an unexpected response, to a user error."""
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except (OfflineModeIsEnabled, HfHubHTTPError, HTTPError, ConnectionError) as fault:
        raise EnvironmentProblem(f"push={name}: {gist(fault)}. {remedy}.") from fault
    except (AttributeError, LookupError, TypeError, ValueError) as fault:  # of other JSON, or of none
        cause = f"unexpected response from the hub ({type(fault).__name__}: {gist(fault)})"
        raise EnvironmentProblem(f"push={name}: {cause}. Check HF_ENDPOINT. {remedy}.") from fault


def repository(name: str, *, private: bool) -> Repository:
    """Return the repository; raise for an invalid name, no token, no write access, or files of no export."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name.count("/") != 1:
        raise ConfigError(f"push={name}: not a repository name. Set push=USER/NAME.")
    try:
        validate_repo_id(name)
    except HFValidationError as fault:
        raise ConfigError(f"push={name}: not a repository name ({gist(fault)}). Set push=USER/NAME.") from fault
    if get_token() is None:
        raise ConfigError(f"push={name}: no token for the hub. Set HF_TOKEN, or log in: hf auth login.")
    api = HfApi()
    with _report_hub_errors(name, "Set a token with write access (HF_TOKEN, or hf auth login), or leave push out"):
        user, (files, is_public) = _User.of(api.whoami()), _files_on_hub(api, name)
    for problem in _problems(name, user, files, would_publish=private and is_public):
        raise ConfigError(problem)
    return Repository(name, private, api)


@dataclass(frozen=True, slots=True)
class _User:
    """Owner of the token."""

    name: str
    access: str | None  # of the token
    roles: dict[str, str | None]  # by organization

    @classmethod
    def of(cls, answer: Any) -> "_User":
        roles = {org["name"]: org.get("roleInOrg") for org in answer.get("orgs", [])}
        return cls(answer["name"], answer.get("auth", {}).get("accessToken", {}).get("role"), roles)


def _files_on_hub(api: Any, name: str) -> tuple[list[str], bool]:
    """Return the files of a repository, which may not exist yet, and whether it is public."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(name)
    except RepositoryNotFoundError:
        return [], False
    files = [sibling.rfilename for sibling in info.siblings or ()]
    return [file for file in files if file not in _CREATED_BY_HUB], info.private is False


def _problems(name: str, user: _User, files: list[str], *, would_publish: bool) -> Iterator[str]:
    """Yield what prevents an upload. `would_publish`: the export is private, but the repository public."""
    owner = name.partition("/")[0]
    if user.access == "read":
        yield f"push={name}: the token is read-only. Set one with write access: HF_TOKEN, or hf auth login."
    if owner != user.name and user.roles.get(owner) not in _WRITERS:
        yield f"push={name}: the token of {user.name} has no write access to {owner}. Set push={user.name}/NAME."
    if files and REPORT not in files:
        yield (
            f"push={name}: finetune export did not create this repository (it has {', '.join(sorted(files)[:3])}). Set "
            "another name: an export replaces all files."
        )
    if would_publish:
        yield f"push={name}: this repository is public, so the export would be. Set private=false, or another name."
