"""adapter.start: an adapter goes on from that of another run, which a resume does not need any more."""

from pathlib import Path

import pytest

from app.assets import locate
from tests.harness.runs import FINISHED, FinishedRuns, Zygote, metrics, result, same_ending

COMMAND = (*FINISHED["lora"], "eval.at_start=true", "seed=0")


def test_adapter_goes_on_from_the_end_of_a_run(finished: FinishedRuns, zygote: Zygote, tmp_path: Path) -> None:
    """Rank, scale and layers are those of the first run, untyped, also where that is gone when the second resumes."""
    first, own = tmp_path / "first", ("adapter.r=4", "adapter.alpha=6", "adapter.targets=[q_proj,down_proj]")
    zygote.run(tmp_path, *COMMAND, *own, "output_dir=first", code=0)
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
    hash_differs = "adapter.start (as a hash): the check"
    other = zygote.run(tmp_path, *COMMAND, *own, "seed=1", "output_dir=other", code=0)
    assert other.code == 0
    zygote.refused(tmp_path, *parts, "adapter.start=other", message=hash_differs)
    first.rename(tmp_path / "elsewhere")
    zygote.run(tmp_path, *parts, "training.stop_after=4", code=75)
    zygote.refused(tmp_path, *parts, "adapter.start=other", message=hash_differs)
    zygote.run(tmp_path, *parts, code=0)
    same_ending(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("adapter.r=4",), "adapter.start=first: it goes on with its own rank and scale. Type adapter.r=32, or leave"),
        (("adapter.start=nowhere",), "adapter.start=nowhere: there is no adapter_config.json with adapter_model.safe"),
        (
            ("adapter.targets=[q_proj]",),
            "and adapter.targets=[q_proj] means others here. Type adapter.targets=[down_pr",
        ),
        (("recipe=full", "optimizer.lr=1e-3"), "recipe=full trains no adapter, so it changes nothing"),
    ],
)
def test_start_of_another_kind_is_refused(
    words: tuple[str, ...], message: str, finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    finished.copy(tmp_path / "first")
    given = {word.partition("=")[0] for word in words}
    kept = [word for word in (*COMMAND, "adapter.start=first") if word.partition("=")[0] not in given]
    zygote.refused(tmp_path, *kept, *words, "output_dir=out", message=message)


def test_start_on_another_base_is_refused(finished: FinishedRuns, zygote: Zygote, tmp_path: Path) -> None:
    first = finished.copy(tmp_path / "first")
    manifest, weights = first / "manifest.json", [word for word in COMMAND if not word.startswith("model.")]
    own = ("model.path=first/base", "adapter.start=first", "output_dir=out", "training.max_steps=1")
    zygote.run(tmp_path, *weights, *own, code=0)
    manifest.write_text(manifest.read_text().replace('"base": null', '"base": "0123"'))
    zygote.refused(tmp_path, *weights, *own, "output_dir=other", message="it was trained on another base")


def test_start_on_a_base_drawn_from_another_seed_is_refused(
    finished: FinishedRuns, zygote: Zygote, tmp_path: Path
) -> None:
    finished.copy(tmp_path / "first")
    words = ("adapter.start=first", "seed=7", "output_dir=out")
    zygote.refused(tmp_path, *COMMAND, *words, message="it was trained on another base")


def test_model_path_of_an_adapter_names_adapter_start(finished: FinishedRuns, zygote: Zygote, tmp_path: Path) -> None:
    finished.copy(tmp_path / "first")
    own = ("recipe=lora", "output_dir=out")
    for path in ("first/final", "first"):
        message = f"model.path=MODEL adapter.start={path}"
        zygote.refused(tmp_path, *own, f"model.path={path}", message=message)


def test_adapter_of_plain_peft_by_a_regular_expression_continues(zygote: Zygote, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(locate("asset:tiny"), dtype="float32")
    config = LoraConfig(r=4, target_modules=r".*\.(q|v)_proj", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(lm, config).save_pretrained(str(tmp_path / "first"))
    words = ("recipe=lora", "adapter.start=first", "dataset.max_rows=60", "training.max_steps=1", "output_dir=out")
    zygote.run(tmp_path, *words, code=0)
    written = (tmp_path / "out" / "run.yaml").read_text()
    assert "  targets:\n  - q_proj\n  - v_proj\n" in written
