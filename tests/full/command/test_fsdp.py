"""A model divided among processes: the numbers of one, saves that any number continues, and a run that goes on."""

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from app.files import files_in, sha256
from tests.command import test_processes
from tests.command.test_processes import with_rate
from tests.conftest import REPO, RunApp
from tests.distributed.test_sharded_checkpoint import Harmful
from tests.full.command import test_masked
from tests.full.command.test_classification import ENCODER, encoder_tokenizer, pair, write
from tests.harness.runs import SMALL, Zygote, metrics, result, same_numbers, tensors
from tests.model.small import distance

FSDP, ZERO2 = "parallel=fsdp", "parallel=zero2"
SCARCE = "tests.harness.scarcity"
# Held out is one batch, so that one process of several has none.
WIDE = (
    *SMALL,
    "model.architecture.hidden_size=192",
    "model.architecture.intermediate_size=512",
    "dataset.eval_max_rows=2",
)
FULL = (*WIDE, "recipe=full", "training.max_steps=6", "checkpoint.every=2")
# At a rate at which so wide a model learns: where the loss grows, roundings do too.
PLAIN = tuple(text.replace("lr=0.5", "lr=0.02") for text in test_processes.PLAIN)


def memory_of(run: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((run / "manifest.json").read_text())["memory"]
    return found


@pytest.fixture(scope="module")
def one(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    folder = tmp_path_factory.mktemp("one")
    zygote.run(folder, *FULL, with_rate(1), f"output_dir={folder / 'run'}", code=0)
    return folder / "run"


@pytest.fixture(scope="module")
def two(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two that divide."""
    folder = tmp_path_factory.mktemp("two")
    zygote.run_together(folder, 2, *FULL, FSDP, with_rate(2), f"output_dir={folder / 'run'}", code=0)
    return folder / "run"


def test_fsdp_two_processes_give_numbers_and_model_of_one(one: Path, two: Path) -> None:
    same_numbers(one, two)
    assert (two / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    left, right = tensors(one), tensors(two)
    assert left.keys() == right.keys()
    assert distance(right, left) <= 1e-6


def test_fsdp_process_keeps_its_share_of_memory_and_checkpoint(one: Path, two: Path) -> None:
    alone, shared = memory_of(one), memory_of(two)
    for part in ("trained_weights", "gradients", "optimizer_states"):
        assert shared[part] == pytest.approx(alone[part] / 2, rel=0.02), part
    shards = list((two / "checkpoints" / "step-000006" / "shards").glob("*.distcp"))
    sizes = [each.stat().st_size for each in shards]
    assert len(sizes) == 2
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


def test_fsdp_received_checkpoint_runs_no_code(zygote: Zygote, tmp_path: Path, two: Path) -> None:
    """Its hashes are right: its maker wrote them too."""
    run = Path(shutil.copytree(two, tmp_path / "run"))
    for save in (run / "checkpoints").iterdir():
        (save / "shards" / "metadata.json").unlink()
        (save / "shards" / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "made")))
        names = [str(file.relative_to(save)) for file in files_in(save) if file.name != "manifest.json"]
        (save / "manifest.json").write_text(json.dumps({name: sha256(save / name) for name in names}))
    ended = zygote.run_together(tmp_path, 2, *FULL, FSDP, with_rate(2), f"output_dir={run}", "resume=auto", code=2)
    assert "no valid metadata" in "".join(each.stderr for each in ended)
    assert not (tmp_path / "made").exists()


AUTO = "parallel=auto"
DDP = "parallel=ddp"
# Muon rounds its matrices to bf16, in another order where they are divided.
MUON = "muon optimizer.lr=2e-4"


def continued(
    zygote: Zygote, folder: Path, command: tuple[str, ...], turns: tuple[tuple[int, str], ...], steps: int
) -> None:
    """Each turn makes a part of the steps."""
    for at, (count, parallel) in enumerate(turns, 1):
        stop = () if at == len(turns) else (f"training.stop_after={at * steps // len(turns)}",)
        start = (*command, parallel, with_rate(count), f"output_dir={folder / 'parts'}", "resume=auto", *stop)
        zygote.run_together(folder, count, *start, code=75 if stop else 0)


OF_SEVERAL, OF_ONE = ((2, ZERO2), (4, FSDP), (2, DDP)), ((1, AUTO), (2, FSDP), (1, AUTO))


@pytest.mark.parametrize(
    ("optimizer", "within", "turns"),
    [("adamw", 1e-6, OF_SEVERAL), ("paged_adamw_32bit", 1e-6, OF_ONE), (MUON, 1e-4, OF_SEVERAL)],
)
def test_checkpoint_is_continued_by_any_engine_and_number(
    zygote: Zygote, tmp_path: Path, optimizer: str, within: float, turns: tuple[tuple[int, str], ...]
) -> None:
    command = (*FULL, *f"optimizer={optimizer}".split(), "training.max_steps=3")
    zygote.run(tmp_path, *command, with_rate(1), f"output_dir={tmp_path / 'whole'}", code=0)
    continued(zygote, tmp_path, command, turns, steps=3)
    same_numbers(tmp_path / "whole", tmp_path / "parts", within)


def test_checkpoint_of_8_bit_states_refuses_another_number(zygote: Zygote, tmp_path: Path) -> None:
    bits = ("optimizer=adamw_8bit", "precision.trained=bf16", "precision=bf16")
    command = (*FULL, *bits, FSDP, f"output_dir={tmp_path / 'run'}", "resume=auto")
    zygote.run_together(tmp_path, 2, *command, with_rate(2), "training.stop_after=2", code=75)
    for other in ((4, FSDP), (1, AUTO)):
        refused = zygote.run_together(tmp_path, other[0], *command, other[1], with_rate(other[0]), code=2)
        assert "8-bit optimizer states" in "".join(each.stderr for each in refused)


def test_fsdp_fp16_overflow_is_skipped_by_all(zygote: Zygote, tmp_path: Path) -> None:
    """The scale follows what overflowed anywhere, so it must stay the same for all: a rate so high finds out."""
    rate = ("optimizer=sgd", "optimizer.lr=1000", "schedule=constant", "training.clip=0")
    command = (*SMALL, *rate, "recipe=full", "precision=fp16", "training.max_steps=4", with_rate(2))
    scales = []
    for parallel in ("ddp", "fsdp"):
        run = tmp_path / parallel
        zygote.run_together(tmp_path, 2, *command, f"parallel={parallel}", f"output_dir={run}", code=0)
        state = json.loads((run / "checkpoints" / "step-000004" / "state.json").read_text())
        scales.append((state["scaler"]["scale"], state["progress"]["skipped_steps"]))
    assert scales[0] == scales[1]
    assert scales[0][1] > 0


def test_hsdp_four_processes_give_numbers_of_one(zygote: Zygote, tmp_path: Path, one: Path) -> None:
    copies = ("parallel=hsdp", "parallel.shard=2", with_rate(4))
    zygote.run_together(tmp_path, 4, *FULL, *copies, f"output_dir={tmp_path / 'four'}", code=0)
    same_numbers(one, tmp_path / "four")


def starts(
    zygote: Zygote, folder: Path, count: int, command: tuple[str, ...], parallel: str = FSDP, **limits: Any
) -> list[tuple[int, list[str]]]:
    """How deep it was after each, and the saves, until the run is at its end."""
    found: list[tuple[int, list[str]]] = []
    run = folder / "scarce"
    again = (*command, *parallel.split(), with_rate(count), f"output_dir={run}", "resume=auto")
    for _ in range(4):
        ended = zygote.run_together(folder, count, *again, module=SCARCE, **limits)
        codes = {each.code for each in ended}
        if codes == {0}:
            return found
        assert codes == {75}, "of the others as well: they know why"
        assert "Traceback" not in "".join(each.stderr for each in ended)
        told = [each.stderr for each in ended if each.stderr.startswith("error: out of memory: a ")]
        assert len(told) == 1, "one message for one cause"
        assert "Run the same command again with resume=auto" in told[0]
        assert result(run)["status"] == "stopped"
        noted = json.loads((run / "checkpoints" / "depth.json").read_text())
        found.append((noted, sorted(each.name for each in (run / "checkpoints").glob("step-*"))))
    raise AssertionError(found)


def test_fsdp_out_of_memory_resumes_in_smaller_parts(zygote: Zygote, tmp_path: Path, one: Path) -> None:
    limits = {"WHERE": "backward", "RANKS": "1", "TOKENS": "48", "CALLS": "36"}
    ((depth, saves),) = starts(zygote, tmp_path, 2, FULL, **limits)
    assert (depth, saves) == (1, ["step-000002"])
    same_numbers(one, tmp_path / "scarce", 2e-6)


def test_fsdp_check_out_of_memory_is_repeated_by_next_start(zygote: Zygote, tmp_path: Path, one: Path) -> None:
    limits: dict[str, Any] = {"WHERE": "backward", "RANKS": "1", "TOKENS": "48", "CALLS": "0"}
    run = tmp_path / "scarce"
    command = (*FULL, FSDP, with_rate(2), f"output_dir={run}", "resume=auto")
    ended = zygote.run_together(tmp_path, 2, *command, module=SCARCE, **limits)
    assert {each.code for each in ended} == {75}
    (told,) = (each.stderr for each in ended if each.stderr)
    assert told.startswith("error: out of memory: a check of the model does not fit")
    assert [each.name for each in run.rglob("*")] == ["checkpoints", "depth.json"]
    zygote.run_together(tmp_path, 2, *command, code=0)
    same_numbers(one, run, 2e-6)


@pytest.mark.parametrize(
    ("count", "more", "limits"),
    [
        (2, "eval.at_start=false", {"WHERE": "forward", "RANKS": "1", "CALLS": "20"}),  # in the first evaluation
        (3, "eval.at_start=auto", {"WHERE": "forward", "RANKS": "2", "CALLS": "22"}),
    ],
)
def test_fsdp_out_of_memory_anywhere_gives_the_same_numbers(
    zygote: Zygote, tmp_path: Path, count: int, more: str, limits: dict[str, str]
) -> None:
    """Bins have different numbers of documents, so one process has more parts of them than another."""
    command = (*WIDE, *PLAIN, "recipe=full", more, "training.max_steps=4", "checkpoint.every=2")
    more_rows = "dataset.eval_max_rows=12"
    enough = (*command, more_rows, with_rate(count), f"output_dir={tmp_path / 'enough'}")
    zygote.run_together(tmp_path, count, *enough, code=0)
    found = starts(zygote, tmp_path, count, (*command, more_rows), TOKENS="40", **limits)
    assert [depth for depth, _ in found] == list(range(1, len(found) + 1)) != []
    same_numbers(tmp_path / "enough", tmp_path / "scarce", 2e-6)


def test_ddp_overlap_out_of_memory_resumes_in_smaller_parts(zygote: Zygote, tmp_path: Path, one: Path) -> None:
    limits = {"WHERE": "backward", "RANKS": "1", "TOKENS": "48", "CALLS": "16"}
    ((depth, _),) = starts(zygote, tmp_path, 2, FULL, "parallel=ddp parallel.overlap=true", **limits)
    assert depth == 1
    same_numbers(one, tmp_path / "scarce", 2e-6)


def test_launcher_out_of_memory_reports_once_and_restarts(run_app: RunApp, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from tests.harness.scarcity import scarce\n"
        "    scarcity = scarce('backward', tokens=48, calls=26)\n"
        "    scarcity.__enter__()\n"
    )
    run = tmp_path / "run"
    command = (*FULL, FSDP, with_rate(2), "launch.num_processes=2", f"output_dir={run}")
    ended = run_app(*command, env={"PYTHONPATH": f"{tmp_path}:{REPO}"}, code=0)
    told, where, again = ended.stderr.splitlines()
    assert told.startswith("error: out of memory: a micro-batch does not fit")
    assert where == "(process 1 of 2)"
    assert again == "restarting from the last checkpoint, with micro-batches in up to 2 parts"
    assert [line["step"] for line in metrics(run) if "loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("count", "held_out"),
    [
        (2, ("batching.packing=false", "eval.rows=4", "dataset.eval_max_rows=12", "eval.samples=0")),  # three batches
        (3, ("dataset.eval_max_rows=12", "eval.samples=3")),
    ],
)
def test_fsdp_evaluation_and_samples_equal_those_of_one_process(
    zygote: Zygote, tmp_path: Path, count: int, held_out: tuple[str, ...]
) -> None:
    rate = {1: 6, 2: 3, 3: 2}
    command = (*WIDE, *PLAIN, *held_out, "recipe=lora", "training.max_steps=2")
    runs = tmp_path / "one", tmp_path / "some"
    for run, number, parallel in zip(runs, (1, count), (AUTO, FSDP), strict=True):
        accumulation = f"batching.accumulation={rate[number]}"
        zygote.run_together(tmp_path, number, *command, parallel, accumulation, f"output_dir={run}", code=0)
    same_numbers(*runs)
    samples = [run / "samples.jsonl" for run in runs]
    assert len({each.read_text() if each.exists() else "" for each in samples}) == 1


def test_fsdp_random_base_and_adapter_load_in_peft(quick_zygote: Zygote, tmp_path: Path) -> None:
    """PEFT loads what comes out, on the base that is kept."""
    command = (*WIDE, *PLAIN, "recipe=lora", "training.max_steps=3")
    one, two = tmp_path / "one", tmp_path / "two"
    quick_zygote.run_together(tmp_path, 1, *command, with_rate(1), f"output_dir={one}", code=0)
    quick_zygote.run_together(tmp_path, 2, *command, FSDP, with_rate(2), f"output_dir={two}", code=0)
    left, right = (load_file(run / "base" / "model.safetensors") for run in (one, two))
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)

    from peft import AutoPeftModelForCausalLM

    ids = torch.arange(3, 40)[None]
    plain = [AutoPeftModelForCausalLM.from_pretrained(str(run / "final"))(ids).logits for run in (one, two)]
    torch.testing.assert_close(plain[1], plain[0], rtol=1e-4, atol=1e-4)
    quick_zygote.run(tmp_path, f"run={two}", "to=out", "kind=merged", module="app.export", code=0)


def test_fsdp_final_best_takes_the_best_weights(zygote: Zygote, tmp_path: Path) -> None:
    """At a rate that ruins the model after a while."""
    rate = ("optimizer.lr=0.05", "schedule=constant", "eval.every=1", "checkpoint.final=best")
    command = (*WIDE, *rate, "recipe=full", "training.max_steps=8", "dataset.eval_max_rows=12")
    one, two = tmp_path / "one", tmp_path / "two"
    zygote.run_together(tmp_path, 1, *command, with_rate(1), f"output_dir={one}", code=0)
    zygote.run_together(tmp_path, 2, *command, FSDP, with_rate(2), f"output_dir={two}", code=0)
    assert "(best evaluation)" in (two / "log.txt").read_text()
    assert distance(tensors(two), tensors(one)) <= 1e-4


def with_labels(folder: Path) -> tuple[str, ...]:
    choose = random.Random(0)
    write(folder / "pairs.jsonl", [pair(choose, i) for i in range(60)])
    encoder_tokenizer(folder / "tokenizer")
    sizes = ("model.architecture.hidden_size=128", "model.architecture.intermediate_size=256")
    return (*ENCODER, *sizes, "optimizer.lr=1e-3", "training.epochs=1")


def with_hidden_tokens(folder: Path) -> tuple[str, ...]:
    from app.base.tokenizer import load_tokenizer
    from app.config.load import compose_run

    tokenizer: Any = load_tokenizer(compose_run([]).model, needs_template=False)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    write(folder / "text.jsonl", [{"text": f"{i}. One two three four five six."} for i in range(60)])
    sizes = ("model.architecture.hidden_size=128", "model.architecture.intermediate_size=256")
    return (*test_masked.SMALL, *sizes, "training.max_steps=3")


def small(_folder: Path) -> tuple[str, ...]:
    return (*WIDE, "training.max_steps=3", "dataset.eval_max_rows=12")


def with_files(_folder: Path) -> tuple[str, ...]:
    """The model that ships."""
    return (*(text for text in SMALL if not text.startswith("model.")), "training.max_steps=3")


# In 16 bits the last bit of a norm moves weights, and the model that ships leaps from a loss of 9.5 to 5.6 in three
# steps, roundings with it.
UNCLIPPED = "training.clip=0"
WEIGHTS = ("frozen_weights", "trained_weights")


ADAMW = "optimizer=adamw"  # which tensors have states in 8 bits depends on their size, and a part is smaller
EXACT, ROUNDED = 1e-6, 1e-5  # the second: where the order of adding up shows
OFFLOADED = ("training.recompute=true", "training.offload=true", "parallel.offload=true")
TIED = ("model.architecture.tie_word_embeddings=true",)
IN_EIGHT_BITS = 5e-3  # rows are rounded to fp8 by their largest number, and chance decides


@pytest.mark.parametrize(
    ("base", "more", "within"),
    [
        (small, ("recipe=qlora", ADAMW, "precision=bf16", "training.recompute=true"), ROUNDED),
        (small, ("recipe=lora", "quantization=fp8"), IN_EIGHT_BITS),
        (small, ("recipe=full", "precision=bf16", "precision.trained=bf16"), 1e-3),
        (small, ("recipe=full", "precision=fp16", UNCLIPPED), 1e-4),
        (small, ("recipe=full", *OFFLOADED, "parallel.sync=last"), EXACT),
        (small, ("recipe=lora", "training.recompute=1", "adapter.dropout=0.1"), EXACT),
        (small, ("recipe=full", *TIED, "batching.packing=false", "training.rehearse=true"), EXACT),
        (with_files, ("recipe=qlora", ADAMW), ROUNDED),
        (small, ("recipe=lora", "compile=blocks", "compile.backend=aot_eager", "eval.samples=0"), ROUNDED),
        (with_labels, ("recipe=full",), EXACT),
        (with_hidden_tokens, (), EXACT),
    ],
)
def test_fsdp_with_each_option_gives_numbers_of_ddp(
    zygote: Zygote, tmp_path: Path, base: Callable[[Path], tuple[str, ...]], more: tuple[str, ...], within: float
) -> None:
    command = (*base(tmp_path), *more, f"cache_dir={tmp_path / 'cache'}")
    whole, divided = tmp_path / "ddp", tmp_path / "fsdp"
    for run in (whole, divided):
        words = [word for word in command if run is divided or word != "parallel.offload=true"]  # shards alone have it
        zygote.run_together(tmp_path, 2, *words, f"parallel={run.name}", f"output_dir={run}", code=0)
    same_numbers(whole, divided, within)
    weights = [sum(memory_of(run)[part] for part in WEIGHTS) for run in (whole, divided)]
    assert weights[1] < 0.6 * weights[0], "each keeps its part"
