"""Stand-in weights for final/, and weights that differ from what the run wrote."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.config.load import read_run
from app.distributed import sharded_checkpoint
from app.errors import CheckpointError
from app.files import CHECKSUMS, sha256
from app.training.final_model import at_checkpoint, kept_checkpoint
from tests.command.test_wrong_inputs import flip
from tests.harness.runs import FINISHED, FinishedRuns, Zygote, metrics


def content(folder: Path) -> dict[str, str]:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}


def shard(save: Path) -> None:
    """Make the checkpoint one of a sharded run."""
    weights = load_file(save / "weights.safetensors")
    (save / "shards").mkdir()
    with pytest.warns(UserWarning, match="save in a single process"):
        sharded_checkpoint.save({f"weights/{name}": each for name, each in weights.items()}, save / "shards", None)
    for name in ("weights.safetensors", "optimizer.safetensors", "manifest.json"):
        (save / name).unlink()
    files = sorted(each for each in save.rglob("*") if each.is_file())
    sums = {str(each.relative_to(save)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
    (save / "manifest.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("recipe", ["lora", "qlora", "full"])
def test_last_checkpoint_whole_or_sharded_is_final(recipe: str, finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run", recipe)
    config = replace(read_run(run / "run.yaml"), output_dir=str(run))
    final, others = content(run / "final"), {"manifest.json", "README.md", "adapter_config.json"}
    expected = {name: digest for name, digest in final.items() if name not in others}
    for divided in (False, True):
        if divided:
            shard(run / "checkpoints" / "step-000006")
        with at_checkpoint(run, "6", config) as place:
            found = content(place / "final")
        assert {name: digest for name, digest in found.items() if name not in others} == expected


def test_evaluate_scores_a_checkpoint_as_the_run_did(finished: FinishedRuns, zygote: Zygote, tmp_path: Path) -> None:
    """An unfinished run has checkpoints too; the file of its own scores stays free."""
    run = finished.copy(tmp_path / "run")
    shutil.rmtree(run / "final")
    zygote.finish(tmp_path, "run=run", "checkpoint=6", module="app.evaluate")
    scores = json.loads((run / "evaluate-step-6.json").read_text())
    assert (scores["run"], scores["checkpoint"], scores["rows_are"]) == ("run", "6", "held_out")
    last = [line for line in metrics(run) if "eval_loss" in line][-1]
    assert scores["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    zygote.refused(tmp_path, "run=run", "checkpoint=4", module="app.evaluate", message="has checkpoints of steps 3, 6.")
    zygote.refused(tmp_path, "run=run", "checkpoint=x", module="app.evaluate", message="checkpoint=x: expected best or")
    asked = ("run=run", "prompt=Name the opposite of new.", "max_new_tokens=4", "checkpoint=3")
    assert zygote.run(tmp_path, *asked, module="app.generate", code=0).stdout


def test_best_checkpoint_is_that_of_the_best_evaluation(finished: FinishedRuns, tmp_path: Path) -> None:
    run = finished.copy(tmp_path / "run")
    losses = {line["step"]: line["eval_loss"] for line in metrics(run) if line.get("eval_loss") and line["step"] > 0}
    best = min(losses, key=lambda step: losses[step])
    if (run / "checkpoints" / f"step-{best:06d}").is_dir():
        assert kept_checkpoint(run, "best").name == f"step-{best:06d}"
    else:
        with pytest.raises(CheckpointError, match=rf"the best evaluation \(step {best}\) was not kept"):
            kept_checkpoint(run, "best")
    weights = run / "checkpoints" / "step-000003" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is damaged"):
        kept_checkpoint(run, "3")


def test_sum_of_adapters_is_exported(finished: FinishedRuns, quick_zygote: Zygote, tmp_path: Path) -> None:
    finished.copy(tmp_path / "a")
    finished.copy(tmp_path / "b", "lora of few layers")
    parts = ("run=a", "adapters=[a:0.7,b/final:-0.3]")
    quick_zygote.run(tmp_path, *parts, "kind=merged", "dtype=fp32", "to=merged", module="app.export", code=0)
    report = json.loads((tmp_path / "merged" / "export.json").read_text())
    assert report["passed"]
    assert report["combined"] == {
        "adapters": {"a": 0.7, "b/final": -0.3},
        "combine": "cat",
        "rank": 36,
        "difference_of_updates": pytest.approx(0, abs=1e-6),
    }
    assert "0.7 of a, -0.3 of final" in (tmp_path / "merged" / "README.md").read_text()
    base, merged = (load_file(tmp_path / place / "model.safetensors") for place in ("a/base", "merged"))
    for name, weight in merged.items():
        expected = base[name] + 0.7 * update(tmp_path / "a", 32, name) - 0.3 * update(tmp_path / "b", 6, name)
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5)

    quick_zygote.run(tmp_path, *parts, "kind=adapter", "rank=8", "to=small", module="app.export", code=0)
    report = json.loads((tmp_path / "small" / "export.json").read_text())
    assert (report["passed"], report["combined"]["combine"], report["combined"]["rank"]) == (True, "svd", 8)
    assert 0 < report["combined"]["difference_of_updates"] < 1

    pruned = ("combine=dare_ties_svd", "density=0.5", "rank=8", "kind=adapter", "to=pruned")
    quick_zygote.run(tmp_path, *parts, *pruned, module="app.export", code=0)
    report = json.loads((tmp_path / "pruned" / "export.json").read_text())
    assert (report["passed"], report["combined"]["density"], report["combined"]["seed"]) == (True, 0.5, 0)


def update(run: Path, alpha: int, name: str) -> Tensor:
    """B A of the adapter of a run, scaled; zero for a weight that it does not adapt."""
    halves = load_file(run / "final" / "adapter_model.safetensors")
    layer = f"base_model.model.{name.removesuffix('.weight')}"
    if f"{layer}.lora_A.weight" not in halves:
        return torch.zeros(())
    a, b = (halves[f"{layer}.lora_{half}.weight"] for half in "AB")
    return alpha / len(a) * b @ a


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("adapters=[a:x]",), "each adapter needs a finite factor after a colon, e.g. a:0.5"),
        (("adapters=[a:0]",), "all factors are 0"),
        (("adapters=[nowhere:1]",), "nowhere has no adapter_config.json"),
        (("adapters=[a:1]", "combine=svd"), "svd needs a rank, and only svd supports one"),
        (("adapters=[a:1]", "combine=linear", "rank=4"), "svd needs a rank, and only svd supports one"),
        (("rank=4",), "combine, rank and density need adapters to sum"),
        (("adapters=[a:1]", "combine=ties"), "need a density, and only they support one"),
        (("adapters=[a:1]", "density=0.5"), "combine=auto density=0.5: ties, dare_ties,"),
        (("adapters=[a:1]", "combine=ties", "density=0.5"), "it needs at least two. Set combine=auto"),
        (("adapters=[a:1]", "checkpoint=3"), "cannot be combined with adapters"),
    ],
)
def test_sum_that_means_nothing_is_refused(
    words: tuple[str, ...], message: str, finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    (tmp_path / "a").symlink_to(finished())
    zygote.refused(tmp_path, "run=a", "kind=adapter", "to=out", *words, module="app.export", message=message)


ADAPTER, BASE = Path("final/adapter_model.safetensors"), Path("base/model.safetensors")
EVALUATE, GENERATE = ("app.evaluate", "run=run"), ("app.generate", "run=run", "prompt=Hi")
EXPORT = ("app.export", "run=run", "kind=adapter", "to=exported")
START = ("app.train", *FINISHED["lora"], "adapter.start=run", "output_dir=next")


def resealed(file: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a file, and its checksum."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    reseal(file)


def reseal(file: Path) -> None:
    manifest = file.parent / CHECKSUMS
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {file.name: sha256(file)}))


def without_one(file: Path) -> None:
    resealed(file, lambda tensors: tensors.pop(min(tensors)))


def with_nan(file: Path) -> None:
    resealed(file, lambda tensors: tensors[min(tensors)].view(-1)[:1].fill_(torch.nan))


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])
    reseal(file)


FLIPPED = "safetensors has changed since it was written"


@pytest.mark.parametrize(
    ("place", "damage", "command", "message"),
    [
        *((ADAPTER, flip, command, FLIPPED) for command in (EVALUATE, GENERATE, EXPORT, START)),
        *((BASE, flip, command, FLIPPED) for command in (EVALUATE, GENERATE, EXPORT)),
        (BASE, flip, (*GENERATE, "checkpoint=3"), FLIPPED),
        (
            Path("final/tokenizer.json"),
            flip,
            (*GENERATE, "checkpoint=3"),
            "tokenizer.json has changed since it was written",
        ),
        *((ADAPTER, without_one, command, "differ in base_model.model") for command in (EVALUATE, GENERATE)),
        *((ADAPTER, with_nan, command, "has NaN, or numbers too large") for command in (EVALUATE, GENERATE)),
        *((ADAPTER, torn, command, "safetensors cannot be loaded (") for command in (EVALUATE, GENERATE)),
        (BASE, with_nan, GENERATE, "in model.safetensors has NaN, or numbers too large"),
    ],
)
def test_damaged_weights_are_refused(
    place: Path,
    damage: Callable[[Path], None],
    command: tuple[str, ...],
    message: str,
    finished: FinishedRuns,
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    damage(finished.copy(tmp_path / "run") / place)
    module, *words = command
    zygote.refused(tmp_path, *words, module=module, message=message)
    assert not (tmp_path / "run" / "evaluate.json").exists()


@pytest.mark.parametrize("damaged", ["first", "second"])
def test_adapter_that_differs_from_its_checksums_is_not_combined(
    damaged: str, finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        finished.copy(tmp_path / name)
    flip(tmp_path / damaged / ADAPTER)
    words = ("run=first", "adapters=[first:0.5,second:0.5]", "kind=adapter", "to=exported")
    zygote.refused(tmp_path, *words, module="app.export", message=FLIPPED)


def test_whole_model_that_differs_from_its_checksums_is_refused(
    finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    run = finished.copy(tmp_path / "run", "full")
    flip(run / "final" / "model.safetensors")
    zygote.refused(tmp_path, "model=run/final", "prompt=Hi", module="app.generate", message=FLIPPED)
    own = [word for word in FINISHED["full"] if not word.startswith("model.")]
    zygote.refused(tmp_path, *own, "model.path=run/final", "output_dir=next", message=FLIPPED)


def test_index_of_a_received_model_decides_neither_format_nor_weights(
    finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    model = finished.copy(tmp_path / "run", "full") / "final"
    (model / CHECKSUMS).unlink()  # as a folder of another program
    tensors, index = load_file(model / "model.safetensors"), model / "model.safetensors.index.json"
    torch.save(tensors, model / "pytorch_model.bin")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, "pytorch_model.bin")}))
    ask = ("model=run/final", "prompt=Hi", "max_new_tokens=4")
    answered = zygote.run(tmp_path, *ask, module="app.generate", code=0)
    assert (
        answered.stderr
        == "note: run/final/model.safetensors.index.json is ignored, because model.safetensors is there too\n"
    )
    (model / "model.safetensors").rename(model / "other.safetensors")
    zygote.refused(tmp_path, *ask, module="app.generate", message="'pytorch_model.bin' is not the name of a .safetens")
