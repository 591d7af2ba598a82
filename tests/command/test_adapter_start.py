"""adapter.start: an adapter goes on from that of another run, which a resume does not need any more."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from app.assets import ROOT
from app.base.source import weight_files, weights_fingerprint
from app.base.weight_files import Names
from app.config.load import compose_run
from app.errors import CheckpointError, ConfigError
from app.training.initial_model import load_start
from tests.command.test_damaged_weights import ADAPTER, resealed, torn, with_nan, without_one
from tests.harness.runs import FINISHED, FinishedRuns, Zygote, metrics, result, same_ending
from tests.model.small import build_model, sections

COMMAND = (*FINISHED["lora"], "eval.at_start=true", "seed=0")
ON_ITS_BASE = [word for word in COMMAND if not word.startswith("model.")]


def test_adapter_start_resumed_equals_uninterrupted_run(finished: FinishedRuns, zygote: Zygote, tmp_path: Path) -> None:
    """Rank, scale and layers are those of the first run, untyped, also where that is gone when the second resumes."""
    first = finished.copy(tmp_path / "first", "lora of few layers")
    command = (*COMMAND, "adapter.start=first")
    zygote.run(tmp_path, *command, "output_dir=whole", code=0)
    begun = metrics(tmp_path / "whole")[0]
    assert begun["step"] == 0
    assert begun["eval_loss"] == pytest.approx(result(first)["eval_loss"], rel=1e-6)
    written = (tmp_path / "whole" / "run.yaml").read_text()
    assert "  r: 4\n  alpha: 6" in written
    assert "  - q_proj" in written

    parts = (*command, "output_dir=parts", "resume=auto")
    zygote.run(tmp_path, *parts, "training.stop_after=3", code=75)
    other = first.rename(tmp_path / "other")
    resealed(other / ADAPTER, lambda tensors: tensors[min(tensors)].neg_())
    zygote.run(tmp_path, *parts, "training.stop_after=4", code=75)
    hash_differs = "adapter.start (as a hash): the check"
    zygote.refused(tmp_path, *parts, "adapter.start=other", message=hash_differs)
    zygote.run(tmp_path, *parts, code=0)
    same_ending(tmp_path / "whole", tmp_path / "parts")


def remarks_of(start: Path, *words: str, command: Sequence[str] = COMMAND) -> list[str]:
    """Return the remarks of a new run that loads the adapter in `start`."""
    typed = {word.partition("=")[0] for word in words}
    command = [word for word in (*command, f"adapter.start={start}") if word.partition("=")[0] not in typed]
    run = compose_run([*command, *words])
    path = ROOT / "tiny" if run.model.weights == "random" else Path(run.model.path)
    model = build_model(sections(run.model, run.adapter), torch.device("cpu"), run.seed, str(path))
    return load_start(run, model, weights_fingerprint(weight_files(path)), Names())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("adapter.r=4",), "its rank and scale cannot change. Set adapter.r=32, or leave"),
        (("adapter.start=nowhere",), "adapter.start=nowhere: no adapter_config.json with adapter_model.safe"),
        (
            ("adapter.targets=[q_proj]",),
            "but adapter.targets=[q_proj] selects other layers. Set adapter.targets=[down_pr",
        ),
        (("recipe=full", "optimizer.lr=1e-3"), "recipe=full trains no adapter"),
        (("seed=7",), "was trained on another base"),
    ],
)
def test_start_of_another_kind_is_refused(words: tuple[str, ...], message: str, finished: FinishedRuns) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        remarks_of(finished(), *words)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_one, "differ from those of this run, e.g. base_model.model"),
        (with_nan, "has NaN, or numbers too large"),
        (torn, "safetensors cannot be loaded ("),
    ],
)
def test_damaged_start_is_refused(
    damage: Callable[[Path], None], message: str, finished: FinishedRuns, tmp_path: Path
) -> None:
    damage(finished.copy(tmp_path / "run") / ADAPTER)
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
        remarks_of(tmp_path / "run")


def test_start_on_another_base_is_refused(finished: FinishedRuns, tmp_path: Path) -> None:
    first = finished.copy(tmp_path / "first")
    base, manifest = f"model.path={first / 'base'}", first / "manifest.json"
    assert remarks_of(first, base, command=ON_ITS_BASE) == []
    manifest.write_text(manifest.read_text().replace('"base": null', '"base": "0123"'))
    with pytest.raises(ConfigError, match="was trained on another base"):
        remarks_of(first, base, command=ON_ITS_BASE)


def test_model_path_of_an_adapter_names_adapter_start(finished: FinishedRuns, zygote: Zygote, tmp_path: Path) -> None:
    finished.copy(tmp_path / "first")
    own = ("recipe=lora", "output_dir=out")
    for path in ("first/final", "first"):
        message = f"model.path=MODEL adapter.start={path}"
        zygote.refused(tmp_path, *own, f"model.path={path}", message=message)


def test_adapter_of_plain_peft_by_a_regular_expression_continues(
    finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = finished() / "base"
    lm = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    config = LoraConfig(r=4, target_modules=r".*\.(q|v)_proj", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(lm, config).save_pretrained(str(tmp_path / "first"))
    words = (f"model.path={base}", "adapter.start=first", "training.max_steps=1", "output_dir=out")
    zygote.run(tmp_path, *ON_ITS_BASE, *words, code=0)
    written = (tmp_path / "out" / "run.yaml").read_text()
    assert "  targets:\n  - q_proj\n  - v_proj\n" in written
