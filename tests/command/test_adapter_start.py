"""adapter.start: an adapter goes on from that of another run, which a resume does not need any more."""

from pathlib import Path

import pytest

from tests.harness.runs import FINISHED, FinishedRuns, Zygote, metrics, result, same_ending

COMMAND = (*FINISHED["lora"], "eval.at_start=true", "seed=0")


def test_adapter_goes_on_from_the_end_of_a_run(finished: FinishedRuns, zygote: Zygote, tmp_path: Path) -> None:
    first = finished.copy(tmp_path / "first")
    command = (*COMMAND, "adapter.start=first")
    zygote.run(tmp_path, *command, "output_dir=whole", code=0)
    begun = metrics(tmp_path / "whole")[0]
    assert begun["step"] == 0
    assert begun["eval_loss"] == pytest.approx(result(first)["eval_loss"], rel=1e-6)

    parts = (*command, "output_dir=parts", "resume=auto")
    zygote.run(tmp_path, *parts, "training.stop_after=3", code=75)
    zygote.refused(
        tmp_path, *parts, f"adapter.start={finished('qlora')}", message="adapter.start (as a hash): the check"
    )
    first.rename(tmp_path / "elsewhere")
    zygote.run(tmp_path, *parts, code=0)
    same_ending(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("adapter.r=4",), "adapter.start=first: it goes on with its own rank and scale. Type adapter.r=32 adapter.a"),
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
    manifest = first / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"base": null', '"base": "0123"'))
    zygote.refused(
        tmp_path, *COMMAND, "adapter.start=first", "output_dir=out", message="it was trained on another base"
    )
