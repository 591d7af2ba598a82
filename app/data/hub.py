"""Datasets of the Hugging Face hub, and folders of `save_to_disk`. `datasets` is imported when needed."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from app.data.cache_key import files_hash
from app.data.shapes import Located
from app.errors import DataError, EnvironmentProblem

_TIMEOUT_SECONDS = (
    10.0  # of the one question that decides whether the hub answers; `datasets` would try for minutes
)


def is_saved_dataset(place: Path) -> bool:
    """Whether `place` was written by `save_to_disk`: a dictionary of splits, or one split."""
    if (place / "dataset_dict.json").is_file():
        return True
    return (place / "state.json").is_file() and (place / "dataset_info.json").is_file()


@dataclass(frozen=True)
class HubRows:
    """One split of a hub dataset, downloaded when first asked for; when offline, from the local cache."""

    name: str
    key: str
    split: str
    hub_config: str | None
    revision: str | None
    left_out: tuple[str, ...] = ()

    def rows(self) -> Iterator[Located]:
        """Every row; counted from 0, as the hub's viewer does."""
        for index, row in enumerate(self._loaded):
            yield f"{self.name}[{self.split}] row {index}", row

    def fingerprint(self) -> str:
        """What `datasets` derives from the files' hashes and the split."""
        return _sha256(self.name, self.split, self.hub_config, self._loaded._fingerprint)

    @cached_property
    def _loaded(self) -> Any:
        import datasets
        from huggingface_hub import errors as hub

        reason = self._why_unreachable()
        was_offline = datasets.config.HF_HUB_OFFLINE
        datasets.config.HF_HUB_OFFLINE = bool(reason) or was_offline
        try:
            loaded = datasets.load_dataset(
                self.name, self.hub_config, split=self.split, revision=self.revision
            )
        except (hub.HTTPError, OSError) as error:
            told = f"{reason}, and it is not in the local cache" if reason else _first_line(error)
            raise self._problem(told) from error
        except (ValueError, datasets.exceptions.DatasetsError) as error:  # lists the splits or configurations
            given = f"{self.key}={self.name} dataset.split={self.split} dataset.hub_config={self.hub_config}"
            raise DataError(f"{given}: {_first_line(error)}") from error
        finally:
            datasets.config.HF_HUB_OFFLINE = was_offline
        if reason and self.revision and not any(self.revision in f["filename"] for f in loaded.cache_files):
            raise self._problem(
                f"{reason}, and the local cache has only another revision than {self.revision}"
            )
        return loaded

    def _why_unreachable(self) -> str:
        """Empty if the hub answers. Absent or gated is an error at once."""
        from huggingface_hub import HfApi
        from huggingface_hub import errors as hub

        try:
            HfApi().dataset_info(self.name, revision=self.revision, timeout=_TIMEOUT_SECONDS)
        except hub.GatedRepoError as error:
            page = f"https://huggingface.co/datasets/{self.name}"
            raise self._problem(f"gated: accept its terms at {page}") from error
        except hub.RevisionNotFoundError as error:
            raise self._problem(f"the hub has it, but not dataset.revision={self.revision}") from error
        except hub.RepositoryNotFoundError as error:
            raise self._problem("not on the hub, or private") from error
        except hub.OfflineModeIsEnabled:
            return "offline (HF_HUB_OFFLINE is set)"
        except (
            hub.HTTPError,
            OSError,
        ) as error:  # the transport's own errors are no OSError in every version
            return f"the hub cannot be reached ({_first_line(error)})"
        return ""

    def _problem(self, what: str) -> EnvironmentProblem:
        return EnvironmentProblem(
            f"{self.key}={self.name}: {what}. For a gated or private dataset set HF_TOKEN to a token that may"
            f" read it (https://huggingface.co/settings/tokens); or download it and give {self.key}=FILE"
        )


@dataclass(frozen=True)
class SavedRows:
    """One split of a folder written by `save_to_disk`."""

    name: str
    key: str
    place: Path
    split: str
    left_out: tuple[str, ...] = ()

    def rows(self) -> Iterator[Located]:
        """Every row, counted from 0."""
        import datasets

        try:
            loaded = datasets.load_from_disk(str(self.place))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.key}={self.name}: cannot be read: {_first_line(error)}") from error
        shown = self.name
        if isinstance(loaded, datasets.DatasetDict):
            if self.split not in loaded:
                known = ", ".join(sorted(loaded))
                raise DataError(f"{self.key}={self.name}: no dataset.split={self.split}; it has: {known}")
            loaded, shown = loaded[self.split], f"{self.name}[{self.split}]"
        for index, row in enumerate(loaded):
            yield f"{shown} row {index}", row

    def fingerprint(self) -> str:
        """A hash of the folder's files."""
        files = [file for file in sorted(self.place.rglob("*")) if file.is_file()]
        content = files_hash((file, file.relative_to(self.place).as_posix()) for file in files)
        return _sha256(self.name, self.split, content)


def _sha256(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
