"""Copies of a run by fsspec: complete, pruned, restored, and never the end of a run."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from app.config.schema import CheckpointConfig
from app.errors import ConfigError
from app.files import CHECKSUMS, checksummed_folder, verify_checksums
from app.training.mirror import Mirror, check
from scripts.cluster.restore import restore

SIGNED = "https://host/key?X-Amz-Signature=0123456789"


class Refusing(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that accepts the first `left` files."""

    protocol = "refusing"
    store: dict[str, Any] = {}  # noqa: RUF012 (declared so in fsspec)
    left = 0

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if not self.left:
            raise PermissionError(f"403 for {SIGNED}")
        type(self).left -= 1
        super().put_file(lpath, rpath, **options)


fsspec.register_implementation("refusing", Refusing)


@pytest.fixture(autouse=True)
def empty_stores() -> Iterator[None]:
    yield
    for store in (MemoryFileSystem, Refusing):
        store.store.clear()
        store.pseudo_dirs[:] = [""]


def save(folder: Path, step: int) -> Path:
    target = folder / f"checkpoints/step-{step:06d}"
    with checksummed_folder(target) as temporary:
        (temporary / "weights.safetensors").write_bytes(bytes([step]))
    return target


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    save(folder, 1)
    (folder / "metrics.jsonl").write_text("1\n")
    (folder / ".lock").write_text("process 1")
    (folder / "wandb").mkdir()
    (folder / "wandb/log").write_text("of a tracker")
    return folder


def content(url: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(url)
    return {name.removeprefix(root): files.cat_file(name) for name in files.find(root)}


def local(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {f"/{path.relative_to(folder)}": path.read_bytes() for path in paths if "wandb" not in path.parts}


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_mirror_of_a_run_has_its_files_and_loses_its_old_checkpoints(scheme: str, run: Path, tmp_path: Path) -> None:
    url = f"{scheme}://{tmp_path}/copies"
    mirror = Mirror(run, url)
    assert mirror.update() == []
    save(run, 2)
    shutil.rmtree(run / "checkpoints/step-000001")
    (run / "metrics.jsonl").write_text("1\n2\n")
    (run / ".writing-final").mkdir()
    (run / ".writing-final/part").touch()
    assert mirror.finish() == [f"copied to {url}/mine"]
    shutil.rmtree(run / ".writing-final")
    assert content(f"{url}/mine") == local(run)


def test_mirror_of_a_run_that_saves_meanwhile_has_no_remark(run: Path) -> None:
    mirror, has_ended = Mirror(run, "memory://bucket"), Event()

    def write() -> None:
        place = run / "checkpoints/.writing-step-000002"
        while not has_ended.is_set():
            place.mkdir()
            (place / "weights.safetensors").touch()
            shutil.rmtree(place)

    writer = Thread(target=write)
    writer.start()
    try:
        remarks = {remark for _ in range(300) for remark in mirror.finish()}
    finally:
        has_ended.set()
        writer.join()
    assert remarks == {"copied to memory://bucket/mine"}


def test_mirror_of_a_resumed_run_does_not_copy_complete_folders_again(run: Path) -> None:
    Mirror(run, "memory://bucket").finish()
    files = fsspec.filesystem("memory")
    weights = "/bucket/mine/checkpoints/step-000001/weights.safetensors"
    before = files.modified(weights)
    save(run, 2)
    Mirror(run, "memory://bucket").finish()
    assert files.modified(weights) == before
    assert content("memory://bucket/mine") == local(run)


def test_failed_copy_is_one_remark_without_secrets(run: Path) -> None:
    Refusing.left = 0
    mirror = Mirror(run, "refusing://bucket")
    remarks = mirror.update() + mirror.finish()
    assert remarks == [
        "checkpoint.mirror: copy to refusing://bucket/mine failed (403 for https://host/key); training continues",
        "checkpoint.mirror: refusing://bucket/mine is not complete",
    ]
    Refusing.left = 100
    assert mirror.finish() == ["copied to refusing://bucket/mine"]


def test_copy_to_a_folder_that_cannot_be_written_is_a_remark(run: Path) -> None:
    first, last = Mirror(run, "file:///proc/copies").finish()
    assert first.startswith("checkpoint.mirror: copy to file:///proc/copies/mine failed (")
    assert last == "checkpoint.mirror: file:///proc/copies/mine is not complete"


def test_interrupted_copy_of_a_checkpoint_is_damaged_after_a_restore(run: Path, tmp_path: Path) -> None:
    Refusing.left = 2  # metrics.jsonl and the weights, not yet their checksums
    Mirror(run, "refusing://bucket").finish()
    restore("refusing://bucket/mine", tmp_path / "back")
    assert verify_checksums(tmp_path / "back/checkpoints/step-000001") == f"{CHECKSUMS} is missing"


def test_restore_copies_a_run_once(run: Path, tmp_path: Path) -> None:
    back = tmp_path / "runs/back"
    assert restore("memory://bucket/mine", back) == "memory://bucket/mine has no checkpoints; nothing copied"
    Mirror(run, "memory://bucket").finish()
    assert restore("memory://bucket/mine/", back) == f"copied {len(local(run))} files to {back}"
    assert local(back) == local(run)
    assert verify_checksums(back / "checkpoints/step-000001") is None
    assert restore("memory://bucket/mine", back) == f"{back} has checkpoints; nothing copied"
    with pytest.raises(SystemExit, match="is not empty"):
        restore("memory://bucket/mine", tmp_path)


def test_mirror_with_checkpoints_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    Mirror(run, "memory://bucket").finish()
    here = run / "checkpoints/step-000001"
    Mirror(run, "memory://bucket").require_own(here)
    other = tmp_path / "other/mine"
    for checkpoint in (None, here):
        with pytest.raises(ConfigError, match="memory://bucket/mine has checkpoints that are not in output_dir="):
            Mirror(other, "memory://bucket").require_own(checkpoint)
    Mirror(other, "memory://empty").require_own(None)


def test_mirror_that_cannot_be_read_at_the_start_is_a_remark(run: Path) -> None:
    mirror = Mirror(run, "no-such-store://bucket")
    mirror.require_own(None)
    (remark,) = mirror.remarks()
    assert remark.startswith("checkpoint.mirror: copy to no-such-store://bucket/mine failed (Protocol not known")


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_missing_package_is_reported_with_the_version_for_fsspec() -> None:
    config = CheckpointConfig(every=1, keep=1, final="last", save_random_base=True, mirror="s3://bucket/runs")
    (problem,) = check(config)
    assert f"pip install s3fs=={fsspec.__version__}" in problem
    assert not list(check(CheckpointConfig(every=1, keep=1, final="last", save_random_base=True, mirror="hf://a/b")))
