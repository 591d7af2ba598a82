"""Checkpoints: written whole, found newest first, continued only by the run that made them."""

import errno
import json
import os
import pickle
import re
import shlex
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch.distributed.checkpoint.api import CheckpointException

from app.config.load import compose_run
from app.config.schema import CheckpointConfig, RunConfig
from app.config.validate import field_types, leaf_keys
from app.data.collate import Padded
from app.data.loader import Loader, StepSplit
from app.data.prepare import Data
from app.distributed import sharded_checkpoint
from app.distributed.launch import read_depth
from app.distributed.process_group import HostGroup, Runtime, start
from app.errors import CheckpointError, EnvironmentProblem
from app.files import checksummed_folder, report_write_errors, verify_checksums
from app.training.checkpoint import Checkpoints, Progress, choices_of, find_checkpoint
from app.training.identity import ROLES, base_hash, changed_settings, compared_settings, differences, role_of
from app.training.train_step import Stepper
from tests.training.conftest import small_run, stepper_of

ALONE = HostGroup(rank=0, count=1)
CHOICES = {"precision": "fp32", "attention": "sdpa"}


def checkpoints(folder: Path, keep: int = 2, **identity: object) -> Checkpoints:
    config = CheckpointConfig(every=1, keep=keep, final="last", save_random_base=True)
    return Checkpoints(folder, config, {"seed": 0, **identity}, CHOICES)


def saved(saver: Checkpoints, progress: Progress, stepper: Stepper) -> Path:
    saver.save(progress, stepper, ALONE)
    return saver.folder / f"step-{progress.step:06d}"


def test_checkpoint_restores_every_bit(
    stepper: Stepper, folder: Path, runtime: Runtime, loader_of: Callable[..., Loader]
) -> None:
    loader = loader_of(4, 1)
    save = saved(checkpoints(folder), Progress(step=1, tokens=7, best_loss=1 / 3), stepper)
    drawn = torch.rand(3)
    stepper.run(loader.batches(1), 1e-2)

    other = stepper_of(small_run("recipe=lora"), runtime)
    other.run(loader.batches(5), 1e-2)
    progress = checkpoints(folder).load(save, other, ALONE)
    assert progress == Progress(step=1, tokens=7, best_loss=1 / 3)
    assert torch.equal(torch.rand(3), drawn)
    other.run(loader.batches(1), 1e-2)
    pairs = zip(stepper.model.trained().values(), other.model.trained().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert choices_of(save) == CHOICES
    assert choices_of(None) == {}


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory, data: Data) -> Path:
    """The saves of steps 1 and 2, each made once in a session."""
    folder = tmp_path_factory.mktemp("kept") / "checkpoints"
    stepper = stepper_of(small_run("recipe=lora"), start(small_run().launch, "fp32", seed=0))
    stepper.run(Loader(data.train, Padded(4, pad_id=0), StepSplit(1, 1, 0), seed=0).batches(0), 1e-2)
    for step in (1, 2):
        saved(checkpoints(folder, steps=9), Progress(step=step), stepper)
    return folder


@pytest.fixture
def both(kept: Path, folder: Path) -> list[Path]:
    """A copy of the saves of steps 1 and 2, in `folder`."""
    return sorted(Path(shutil.copytree(kept, folder)).iterdir())


@pytest.fixture
def save(both: list[Path]) -> Path:
    """The save of step 1, alone in `folder`."""
    one, two = both
    shutil.rmtree(two)
    return one


def test_resume_begins_at_home(save: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert find_checkpoint(folder, f"~/{save.name}") == (save, [])


def test_checkpoint_contains_no_pickle(save: Path) -> None:
    assert {file.suffix for file in save.iterdir()} == {".safetensors", ".json"}


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"])
@pytest.mark.parametrize("hurt", ["flip", "cut", "remove"])
def test_damaged_checkpoint_is_detected(save: Path, folder: Path, name: str, hurt: str) -> None:
    assert verify_checksums(save) is None
    file = save / name
    content = bytearray(file.read_bytes())
    if hurt == "remove":
        file.unlink()
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content if hurt == "flip" else content[:-1])
    assert name in (verify_checksums(save) or "")
    with pytest.raises(CheckpointError, match=r"resume=.*damaged"):
        find_checkpoint(folder, str(save))


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ({}, "is not in manifest.json"),
        ({"weights.safetensors": None}, "weights.safetensors is not in manifest.json"),
        ({"state.json": None}, "state.json is not in manifest.json"),
        ({"../../../../../../../etc/hostname": "0"}, "etc/hostname is missing"),
        ({"/etc/hostname": "0"}, "/etc/hostname is missing"),
        ({"x" * 300: "0"}, "xxx is missing"),
        ({"x\0": "0"}, "is missing"),
        (["state.json"], "manifest.json cannot be read"),
        ("[" * 100_000, "manifest.json cannot be read"),
    ],
)
def test_checkpoint_with_another_manifest_is_damaged(
    save: Path, folder: Path, hashes: dict[str, str | None] | list[str] | str, message: str
) -> None:
    """A manifest may list more than it must, and lacks no file that is read."""
    (save / "notes.txt").write_text("mine")
    up = save / ".." / save.name
    assert find_checkpoint(folder, str(up)) == (up, [])
    manifest = save / "manifest.json"
    if isinstance(hashes, dict) and hashes:
        all_hashes = json.loads(manifest.read_text()) | hashes
        hashes = {name: value for name, value in all_hashes.items() if value is not None}
    manifest.write_text(hashes if isinstance(hashes, str) else json.dumps(hashes))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        find_checkpoint(folder, str(save))


def test_resume_auto_takes_newest_intact_checkpoint(stepper: Stepper, folder: Path) -> None:
    assert find_checkpoint(folder, "auto") == (None, [])
    saver = checkpoints(folder, keep=5)
    saves = [saved(saver, Progress(step=step), stepper) for step in (1, 2, 10)]
    assert find_checkpoint(folder, None) == (None, [])
    assert find_checkpoint(folder, "auto") == (saves[2], [])
    (saves[2] / "manifest.json").unlink()
    save, remarks = find_checkpoint(folder, "auto")
    assert save == saves[1]
    assert len(remarks) == 1
    assert "step-000010" in remarks[0]
    for save in saves[:2]:
        (save / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged"):
        find_checkpoint(folder, "auto")


def with_valid_hashes(save: Path, name: str, content: bytes | None) -> None:
    """Replace a file, or remove it, as if the checkpoint had been written so."""
    copy = save.with_name("copy")
    with checksummed_folder(copy) as aside:
        for file in save.iterdir():
            if file.name not in {name, "manifest.json"}:
                (aside / file.name).write_bytes(file.read_bytes())
        if content is not None:
            (aside / name).write_bytes(content)
    shutil.rmtree(save)
    copy.rename(save)


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("state.json", b"{}", "state.json is invalid"),
        ("state.json", b"[1]", "state.json is invalid"),
        ("weights.safetensors", pickle.dumps({"weight": 1}), "weights.safetensors has no tensors"),
        ("optimizer.safetensors", b"", "optimizer.safetensors has no tensors"),
        ("random.safetensors", None, "random.safetensors has no tensors"),
    ],
)
def test_checkpoint_of_wrong_content_is_passed_over(
    both: list[Path], folder: Path, name: str, content: bytes | None, cause: str
) -> None:
    older, newer = both
    with_valid_hashes(newer, name, content)
    assert verify_checksums(newer) is None
    save, (remark,) = find_checkpoint(folder, "auto")
    assert save == older
    assert cause in remark
    with pytest.raises(CheckpointError, match=cause):
        find_checkpoint(folder, str(newer))


@pytest.mark.parametrize(
    ("section", "changed"),
    [
        ("progress", {"step": -5}),
        ("progress", {"step": "text"}),
        ("progress", {"step": None}),
        ("progress", {"step": 10**9}),
        ("progress", {"depth": 21}),
        ("progress", {"metrics": {"eval_loss": "low"}}),
        ("progress", {"start_metrics": {"exact_match": []}}),
        ("progress", {"of_tomorrow": 1}),
        ("choices", {"precision": 1}),
        ("identity", {"steps": "many"}),
        ("scaler", [1]),
        ("optimizer", {"param_groups": [{"dict": [["weight_decay", "much"]]}]}),
        ("optimizer", {"param_groups": [1]}),
    ],
    ids=str,
)
def test_state_out_of_range_is_passed_over(both: list[Path], folder: Path, section: str, changed: Any) -> None:
    older, newer = both
    state = json.loads((newer / "state.json").read_text())
    state[section] = {**state[section], **changed} if isinstance(changed, dict) else changed
    with_valid_hashes(newer, "state.json", json.dumps(state).encode())
    save, (remark,) = find_checkpoint(folder, "auto")
    assert save == older
    assert "state.json is invalid" in remark


def test_checkpoint_of_other_shapes_is_refused(stepper: Stepper, folder: Path) -> None:
    save = saved(checkpoints(folder), Progress(step=1), stepper)
    wrong = {name: torch.zeros(2, 2) for name in load_file(save / "weights.safetensors")}
    with_valid_hashes(save, "weights.safetensors", serialize(wrong))
    with pytest.raises(CheckpointError, match=r"has shape \[2, 2\] in the checkpoint, but not in this run"):
        checkpoints(folder).load(save, stepper, ALONE)


def test_newest_and_best_checkpoints_are_kept(stepper: Stepper, folder: Path) -> None:
    saver = checkpoints(folder, keep=2)
    for step in range(1, 7):
        saved(saver, Progress(step=step, best_step=min(step, 2)), stepper)
    assert sorted(f.name for f in folder.iterdir()) == ["step-000002", "step-000005", "step-000006"]
    assert saver.best(Progress(best_step=2)) == folder / "step-000002"
    assert saver.best(Progress(best_step=3)) is None


def test_checkpoint_of_another_run_is_refused(stepper: Stepper, folder: Path) -> None:
    save = saved(checkpoints(folder, rows=8), Progress(step=1), stepper)
    other = checkpoints(folder, rows=4, seed=1)
    with pytest.raises(CheckpointError, match=r"rows: the checkpoint has 8, this run has 4.*seed") as refusal:
        other.load(save, stepper, ALONE)
    assert "To resume" not in str(refusal.value), "the command is not known"
    command = ["python", "-m", "app.train", "dataset.path=a b.jsonl", "output_dir=here", "seed=0"]
    (folder.parent / "manifest.json").write_text(json.dumps({"starts": [{"command_line": command}]}))
    with pytest.raises(CheckpointError) as refusal:
        other.load(save, stepper, ALONE)
    typed = shlex.split(str(refusal.value).rpartition("To resume:")[2])
    assert typed[2:] == ["dataset.path=a b.jsonl", "seed=0", f"output_dir={folder.parent}", "resume=auto"]


def test_checkpoint_without_save_number_refused_as_too_old(save: Path) -> None:
    state = json.loads((save / "state.json").read_text())
    assert choices_of(save) == state["choices"]
    del state["save"]
    (save / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"was saved before version 0\.1\.0 and cannot be resumed\."):
        choices_of(save)


def test_unfinished_checkpoint_is_removed(save: Path, folder: Path) -> None:
    torn = folder / ".writing-step-000002"
    torn.mkdir()
    (torn / "weights.safetensors").write_bytes(b"half")
    assert find_checkpoint(folder, "auto") == (save, [])
    assert not torn.exists()


def test_full_disk_keeps_older_checkpoints(stepper: Stepper, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = checkpoints(folder)
    save = saved(saver, Progress(step=1), stepper)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem) as refusal:
        saved(saver, Progress(step=2), stepper)
    message = str(refusal.value)
    assert message.startswith(f"the disk is full: {folder}/step-000002 could not be written. Earlier checkpoints are")
    assert message.endswith(f"resume with resume=auto, or on another disk with output_dir=DIR resume={save}.")
    assert [f.name for f in folder.iterdir()] == ["step-000001"]
    assert verify_checksums(save) is None


def test_full_disk_of_a_sharded_save_is_recognized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP wraps the error of each process."""

    def fail(*_: object, **__: object) -> None:
        cause = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        raise CheckpointException("", {1: (cause, traceback.StackSummary())})

    monkeypatch.setattr("torch.distributed.checkpoint.state_dict_saver.save", fail)
    message = r"the disk quota is used up: .*Nothing was saved yet"
    with pytest.raises(EnvironmentProblem, match=message), report_write_errors(folder / "step-000002"):
        sharded_checkpoint.save({}, folder, None)


def test_resume_accepts_a_run_folder(stepper: Stepper, tmp_path: Path) -> None:
    save = saved(checkpoints(tmp_path / "checkpoints"), Progress(step=3), stepper)
    assert find_checkpoint(tmp_path / "elsewhere", str(tmp_path)) == (save, [])
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        find_checkpoint(tmp_path, str(tmp_path / "checkpoints"))


def test_note_eval_needs_min_delta() -> None:
    progress = Progress(step=1)
    assert progress.note_eval({"eval_loss": 2.0}, 0.1)
    progress.step = 2
    assert not progress.note_eval({"eval_loss": 1.95}, 0.1)
    assert (progress.evals_without_gain, progress.best_step) == (1, 1)
    assert progress.note_eval({"eval_loss": 1.8}, 0.1)
    assert (progress.evals_without_gain, progress.best_step, progress.last_eval_loss) == (0, 2, 1.8)


def test_read_depth_of_a_torn_file_is_zero(tmp_path: Path) -> None:
    file = tmp_path / "depth.json"
    for text, depth in (("", 0), ("2", 2), ("{", 0), ("²", 0), ("-1", 0), ("9999999", 20), ("9" * 5000, 20)):
        file.write_text(text)
        assert read_depth(file) == depth


@dataclass
class Branch:
    """Saves of a run, some of which are damaged; then a start that goes on from one of them and saves again."""

    saves: tuple[int, ...]
    resumed: int
    then: int
    left: tuple[int, ...]
    damaged: tuple[int, ...] = ()
    best: int = 0
    keep: int = 2
    counted: bool = True  # false: saved by a version that kept no count


BRANCHES = {
    "newest first": Branch((2, 4, 6), resumed=6, then=8, left=(6, 8)),
    "back to an earlier step": Branch((2, 4, 6), resumed=2, then=3, left=(2, 3)),
    "back, and best": Branch((2, 4, 6), resumed=2, then=3, left=(2, 3, 4), best=4),
    "back, without a count": Branch((2, 4, 6), resumed=2, then=3, left=(2, 3), counted=False),
    "one kept": Branch((2, 4), resumed=2, then=3, left=(3,), keep=1),
    "damaged ones do not count": Branch((3, 8, 9), resumed=3, then=5, left=(3, 5), damaged=(8, 9)),
    "damaged ones end": Branch((3, 8, 9, 3, 4), resumed=4, then=5, left=(4, 5), damaged=(8, 9)),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_newest_is_the_last_saved(name: str, stepper: Stepper, folder: Path) -> None:
    branch = BRANCHES[name]
    places = [saved(checkpoints(folder, keep=9), Progress(step=step), stepper) for step in branch.saves]
    for place in places if not branch.counted else ():
        state = json.loads((place / "state.json").read_text())
        with_valid_hashes(place, "state.json", json.dumps({k: v for k, v in state.items() if k != "save"}).encode())
    for step in branch.damaged:
        (folder / f"step-{step:06d}" / "weights.safetensors").write_bytes(b"")
    for age, place in enumerate(reversed(places)):
        os.utime(place, (age, age))  # as after a copy: times of files say nothing

    saver, resumed = checkpoints(folder, branch.keep), folder / f"step-{branch.resumed:06d}"
    saver.load(resumed, stepper, ALONE)
    saver.note_resumed(resumed)
    assert find_checkpoint(folder, "auto") == (resumed, [])
    newest = saved(saver, Progress(step=branch.then, best_step=branch.best), stepper)
    assert sorted(int(save.name.removeprefix("step-")) for save in folder.glob("step-*")) == list(branch.left)
    assert find_checkpoint(folder, "auto") == (newest, [])
    assert find_checkpoint(folder.parent / "elsewhere", str(folder.parent)) == (newest, [])
    with pytest.raises(EnvironmentProblem, match=f"resume={newest}"), report_write_errors(folder.parent / "log.txt"):
        raise OSError(errno.ENOSPC, "")


def test_run_that_goes_on_elsewhere_begins_there_until_it_has_saved(stepper: Stepper, folder: Path) -> None:
    place, other = saved(checkpoints(folder), Progress(step=2), stepper), folder.parent / "other" / "checkpoints"
    other.parent.mkdir()
    saver = checkpoints(other)
    saver.note_resumed(place)
    assert find_checkpoint(other, "auto")[0] == place
    place.rename(folder / "moved")
    with pytest.raises(
        CheckpointError, match=f"{other} has no checkpoint yet, and {place}, which it resumes from, does not exist"
    ):
        find_checkpoint(other, "auto")
    newest = saved(saver, Progress(step=3), stepper)
    assert find_checkpoint(other, "auto") == (newest, [])


def test_every_key_has_a_role() -> None:
    assert [key for key in leaf_keys(RunConfig) if role_of(key) is None] == []
    assert ROLES.keys() <= field_types(RunConfig).keys()


def different(before: str, now: str, precision: str = "fp32") -> list[str]:
    saved, current = (compared_settings(small_run(*words.split()), "fp32") for words in (before, now))
    return [text.partition(":")[0] for text in differences(saved, {**current, "precision.kind": precision})]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("optimizer=sgd", [f"optimizer.{key}" for key in ("beta1", "beta2", "eps", "kind", "momentum")]),
        (
            "seed=1 optimizer.lr=1 optimizer.weight_decay=1 optimizer.beta2=0.5 optimizer.eps=1e-3 training.clip=2 "
            "schedule.warmup_fraction=0.5 schedule.final_fraction=1 adapter.r=8 adapter.targets=[q_proj]",
            [
                *("adapter.r", "adapter.targets", "optimizer.beta2", "optimizer.eps", "optimizer.lr"),
                *("optimizer.weight_decay", "schedule.final_fraction", "schedule.warmup_fraction", "seed"),
                "training.clip",
            ],
        ),
        ("precision.trained=bf16 precision=bf16 recipe=full", ["precision.trained"]),
        # what docs/problems.md and docs/many-gpus.md promise, and what decides no number
        ("training.recompute=true training.offload=true parallel=fsdp launch.num_processes=2", []),
        ("optimizer.in_backward=true training.clip=0 recipe=full", []),
        ("attention=varlen compile=blocks training.stop_after=1 training.max_bad_steps=1", []),
        ("eval.every=7 checkpoint.keep=9 record.every=3 tracker=wandb output_dir=x resume=auto cache_dir=y", []),
    ],
)
def test_compared_settings_differ_where_numbers_would(words: str, keys: list[str]) -> None:
    before = "recipe=full" if "recipe=full" in words else ""
    assert different(before, words) == keys


def test_another_recipe_is_another_run() -> None:
    assert "adapter.kind" in different("", "recipe=full")


def test_precision_is_compared_as_it_came_out() -> None:
    assert different("precision=auto", "precision=fp32") == []
    assert different("", "", precision="bf16") == ["precision.kind"]


def test_changed_settings_are_numbers_and_kinds_not_resolved_names() -> None:
    saved = compose_run(["precision=bf16", "adapter.train_tokens=[1,2]"])
    assert changed_settings(saved, compose_run(["precision=auto", "adapter.train_tokens=all"])) == {}
    now = compose_run(["precision=bf16", "optimizer.lr=1.0", "schedule=linear", "output_dir=other", "eval.every=7"])
    linear = {"schedule.kind": ("cosine", "linear"), "schedule.final_fraction": (0.1, 0.0)}
    assert changed_settings(saved, now) == {"optimizer.lr": (0.002, 1.0)} | linear


def test_only_what_both_know_is_compared() -> None:
    assert differences({"seed": 0, "gone": 1}, {"seed": 0, "new": 2}) == []
    assert differences({"seed": 0}, {"seed": 1}) == ["seed: the checkpoint has 0, this run has 1"]


def test_base_is_its_hash_where_both_have_one() -> None:
    model = small_run().model
    other = replace(model, architecture={**model.architecture, "rope_theta": 5.0})
    here, there = {"model.path": "a"}, {"model.path": "b"}
    assert differences(here, there) == ["model.path: the checkpoint has a, this run has b"]
    assert differences(here | base_hash(model, None), there) != []
    assert differences(here | base_hash(model, None), there | base_hash(model, None)) == []
    assert [
        text.partition(":")[0] for text in differences(here | base_hash(model, None), here | base_hash(other, None))
    ] == ["the base (as a hash)"]
