"""A training step: independent of its split, in backward, and rehearsed with the largest micro-batch."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from app.data.loader import Loader
from app.distributed.gradient_reduction import GradientReduction
from app.distributed.process_group import Runtime
from app.errors import ConfigError, EnvironmentProblem
from app.layers.activation_checkpointing import recompute_rest
from app.model.training_model import TrainingModel
from app.optim.optimizers import LossScale
from app.signals import StopRequest
from app.training.storage_counter import kept_bytes
from app.training.summary import rehearsal_message
from app.training.train_step import Rehearsal, Stepper, is_due, rehearse, require_gradients_one_by_one
from app.training.trainer import Trainer
from tests.harness.runs import CLOCKS
from tests.harness.scarcity import WHERE, scarce
from tests.training.conftest import MakeLoop, Notebook, small_run, stepper_of, trainee_of

RECIPES = ["full", "lora", "qlora"]


def gradients(stepper: Stepper) -> list[Tensor]:
    return [p.grad.clone() for p in stepper.model.trained().values() if p.grad is not None]


def relative(left: list[Tensor], right: list[Tensor]) -> float:
    assert len(left) == len(right) > 0
    difference = torch.nn.utils.get_total_norm([a - b for a, b in zip(left, right, strict=True)])
    return float(difference / torch.nn.utils.get_total_norm(right))


def warm(stepper: Stepper, loader: Loader) -> Stepper:
    """One step first: at the start every lora_B is zero, and half of the gradients with it."""
    stepper.run(loader.batches(1), 1e-2)
    return stepper


def plain_loss(model: TrainingModel, loader: Loader, step: int) -> Tensor:
    """The mean over all trained tokens, from the full logits of one row at a time, written out."""
    losses = []
    for batch in loader.batches(step):
        for r in range(batch.ids.shape[0]):
            width = batch.ids.shape[1]
            mine = (batch.label_rows >= r * width) & (batch.label_rows < (r + 1) * width)
            at, targets = batch.label_rows[mine] - r * width, batch.targets[mine]
            logits = model.language_model(batch.ids[r : r + 1, : batch.lengths[r]]).logits[0]
            losses.append(F.cross_entropy(logits[at].double(), targets, reduction="none"))
    return torch.cat(losses).mean()


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradient_does_not_depend_on_micro_batches(
    recipe: str, runtime: Runtime, loader_of: Callable[..., Loader]
) -> None:
    run = small_run(f"recipe={recipe}", "training.clip=0")
    results = {}
    for rows, micro in ((8, 1), (4, 2), (2, 4), (1, 8)):
        loader = loader_of(rows, micro)
        stepper = stepper_of(run, runtime)
        losses = []
        for step in range(2):
            result = stepper.run(loader.batches(step), 1e-3)
            losses.append(float(result.loss_sum) / result.labels)
        results[rows, micro] = gradients(stepper), losses
    reference, reference_losses = results[8, 1]
    for grads, losses in results.values():
        assert relative(grads, reference) <= 1e-6
        assert losses == pytest.approx(reference_losses, rel=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradient_equal_the_formula(recipe: str, runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    run = small_run(f"recipe={recipe}", "training.clip=0")
    loader = loader_of(4, 2)
    stepper = warm(stepper_of(run, runtime), loader)
    result = stepper.run(loader.batches(0), 0.0)
    ours = gradients(stepper)
    stepper.optimizer.zero_grad()
    loss = plain_loss(stepper.model, loader, 0)
    loss.backward()
    assert float(result.loss_sum) / result.labels == pytest.approx(float(loss.detach()), rel=1e-6)
    assert relative(ours, gradients(stepper)) <= 1e-6


def test_clipping_reports_the_unclipped_norm(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(8, 1)
    free = stepper_of(small_run("recipe=full", "training.clip=0"), runtime)
    tight = stepper_of(small_run("recipe=full", "training.clip=0.01"), runtime)
    results = [stepper.run(loader.batches(0), 0.0) for stepper in (free, tight)]
    assert float(results[0].grad_norm) == pytest.approx(float(results[1].grad_norm))
    assert float(results[0].grad_norm) > 0.1
    assert float(torch.nn.utils.get_total_norm(gradients(tight))) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adamw_8bit"])
def test_nonfinite_gradient_skips_the_step(optimizer: str, runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    run = small_run("recipe=full", f"optimizer={optimizer}")
    loader = loader_of(8, 1)
    stepper, untouched = (warm(stepper_of(run, runtime), loader) for _ in range(2))
    hook = next(iter(stepper.model.trained().values())).register_hook(lambda g: g * float("nan"))
    result = stepper.run(loader.batches(2), 1e-3)
    hook.remove()
    assert bool(result.skipped)
    for candidate in (stepper, untouched):
        assert not bool(candidate.run(loader.batches(3), 1e-3).skipped)
    pairs = zip(stepper.model.trained().values(), untouched.model.trained().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_fp16_scaled_gradient_equals_fp32(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(2, 1)
    half = stepper_of(small_run("recipe=full", "precision=fp16", "training.clip=0"), runtime)
    exact = stepper_of(small_run("recipe=full", "training.clip=0"), runtime)
    assert half.scale is not None
    assert half.scale.value > 1
    results = [stepper.run(loader.batches(0), 0.0) for stepper in (half, exact)]
    assert not bool(results[0].skipped)
    difference = relative(gradients(half), gradients(exact))
    assert difference < 0.02
    assert difference > 0, "fp16 computed in fp32"


def test_fp16_overflow_lowers_the_scale_and_skips(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    stepper = stepper_of(small_run("recipe=full", "precision=fp16"), runtime)
    assert stepper.scale is not None
    before = [p.clone() for p in stepper.model.trained().values()]
    hook = next(iter(stepper.model.trained().values())).register_hook(lambda g: g * float("inf"))
    assert bool(stepper.run(loader_of(2, 1).batches(0), 1e-3).skipped)
    hook.remove()
    assert stepper.scale.value == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(before, stepper.model.trained().values(), strict=True))


def test_fp16_gradients_of_offloaded_shards_are_scaled_on_the_host() -> None:
    stepper = Stepper.__new__(Stepper)
    with FakeTensorMode():
        device = torch.device("cuda")
        stepper.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
        stepper.scale, stepper._clip, stepper._skips_on_device = LossScale(device), 1.0, True
        stepper._runtime, stepper._reduction = SimpleNamespace(device=device), GradientReduction([])  # type: ignore[assignment]
        norm, skipped = stepper._update([torch.ones(2)])
        assert norm.device == skipped.device == torch.device("cpu"), "a factor on the GPU would multiply none of them"


def test_lr_ratio_trains_as_lora_plus_of_peft(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(16, 1)
    run = small_run("recipe=lora", "adapter.lr_ratio=16", "training.clip=0", "optimizer.weight_decay=0.01")
    stepper, model = stepper_of(run, runtime), trainee_of(run)
    theirs = create_loraplus_optimizer(
        model.network, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.01
    )
    for step in range(3):
        stepper.run(loader.batches(step), 1e-3)
        theirs.zero_grad()
        plain_loss(model, loader, step).backward()
        theirs.step()
    assert {group["lr"] for group in stepper.optimizer.param_groups} == {1e-3, 16e-3}
    plain = model.trained()
    assert all(relative([parameter], [plain[name]]) <= 1e-5 for name, parameter in stepper.model.trained().items())


@pytest.mark.parametrize(("recipe", "tokens"), [("full", 64), ("lora", 256), ("qlora", 64)])
def test_packed_gradient_equals_padded(
    recipe: str,
    tokens: int,
    runtime: Runtime,
    loader_of: Callable[..., Loader],
    packed_loader_of: Callable[..., Loader],
) -> None:
    """All rows in one step, once padded and once packed: nothing leaks from one document into the next."""
    run = small_run(f"recipe={recipe}", "training.clip=0")
    padded = loader_of(64, 1)
    packed = packed_loader_of(tokens, packed_loader_of(tokens, 1).num_units)
    assert padded.steps_per_epoch == packed.steps_per_epoch == 1
    stepper, results = warm(stepper_of(run, runtime), padded), []
    for loader in (padded, packed):
        result = stepper.run(loader.batches(0), 0.0)
        results.append((gradients(stepper), float(result.loss_sum) / result.labels, result.tokens))
    assert relative(results[1][0], results[0][0]) <= 1e-6
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-6)
    assert results[1][2] == results[0][2]


FULL = ("recipe=full", "training.clip=0", "training.recompute=1")
BF16 = ("precision=bf16", "precision.trained=bf16")
AS_THEY_COME = "optimizer.in_backward=true"


def weights(stepper: Stepper) -> list[Tensor]:
    return [p.detach().clone() for p in stepper.model.trained().values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def norms(stepper: Stepper, loader: Loader, steps: range) -> list[float]:
    return [float(stepper.run(loader.batches(step), 1e-3).grad_norm) for step in steps]


@pytest.mark.parametrize(("optimizer", "words"), [("adamw", BF16), ("adamw_8bit", ()), ("muon", BF16)], ids=str)
def test_in_backward_gives_the_same_weights(
    optimizer: str, words: tuple[str, ...], runtime: Runtime, loader_of: Callable[..., Loader]
) -> None:
    """To the last bit: also of a head tied to the embedding, which has its gradient from two places."""
    tied = "model.architecture.tie_word_embeddings=true"
    run = (*FULL, *words, tied, f"optimizer={optimizer}")
    loader = loader_of(4, 1)
    after, within = (stepper_of(small_run(*run, *more), runtime) for more in ((), (AS_THEY_COME,)))
    assert norms(within, loader, range(3)) == norms(after, loader, range(3))
    assert same(weights(within), weights(after))
    assert {p.dtype for p in weights(within)} == {torch.bfloat16 if words else torch.float32}
    assert all(p.grad is None for p in within.model.parameters())
    assert kept_bytes(within.model, within.optimizer)["gradients"] == 0


def test_in_backward_holds_two_gradients_at_most(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    stepper = stepper_of(small_run(*FULL, AS_THEY_COME), runtime)
    parameters = list(stepper.model.trained().values())
    alive = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    stepper.run(loader_of(4, 1).batches(0), 1e-3)
    assert len(alive) == len(parameters) > 10
    assert max(alive) <= 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_in_backward_skips_only_nonfinite_parameters(
    optimizer: str, runtime: Runtime, loader_of: Callable[..., Loader]
) -> None:
    loader = loader_of(4, 1)
    stepper = stepper_of(small_run(*FULL, *BF16, AS_THEY_COME, f"optimizer={optimizer}"), runtime)
    norms(stepper, loader, range(1))
    before = weights(stepper)
    at, victim = next((i, p) for i, p in enumerate(stepper.model.trained().values()) if p.ndim == 2)
    hook = victim.register_hook(lambda g: g * float("nan"))
    result = stepper.run(loader.batches(1), 1e-3)
    hook.remove()
    assert bool(result.skipped)
    assert not result.grad_norm.isfinite()
    changed = [not torch.equal(a, b) for a, b in zip(weights(stepper), before, strict=True)]
    assert not changed[at]
    assert sum(changed) == len(changed) - 1
    assert not bool(stepper.run(loader.batches(2), 1e-3).skipped)
    assert not torch.equal(weights(stepper)[at], before[at])


def test_in_backward_retries_a_forward_pass_in_parts(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    """Nothing has changed by then; the gradients of the parts add up, and the last one makes the steps."""
    loader = loader_of(8, 1)
    whole, parts = (stepper_of(small_run(*FULL, AS_THEY_COME, "optimizer=sgd"), runtime) for _ in range(2))
    tokens = int(0.8 * loader.batches(0)[0].ids.numel())
    expected = whole.run(loader.batches(0), 1e-2)
    with scarce("forward", tokens=tokens) as memory:
        result = parts.run(loader.batches(0), 1e-2)
    assert memory.times == parts.split_depth >= 1
    assert float(result.grad_norm) == pytest.approx(float(expected.grad_norm), rel=1e-5)
    for a, b in zip(weights(parts), weights(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert all(p.grad is None for p in parts.model.parameters())


def test_in_backward_never_repeats_after_an_update(runtime: Runtime, loader_of: Callable[..., Loader]) -> None:
    loader = loader_of(8, 1)
    stepper = stepper_of(small_run(*FULL, AS_THEY_COME), runtime)
    with (
        scarce("backward", tokens=4) as memory,
        pytest.raises(EnvironmentProblem, match="already updated weights and so cannot be repeated"),
    ):
        stepper.run(loader.batches(0), 1e-3)
    assert memory.times == 1


def test_in_backward_update_out_of_memory_ends_the_run(
    runtime: Runtime, loader_of: Callable[..., Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = stepper_of(small_run(*FULL, AS_THEY_COME), runtime)
    optimizer: Any = stepper.optimizer

    def out(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(optimizer.inner, "step", out)
    with pytest.raises(EnvironmentProblem, match="already updated weights"):
        stepper.run(loader_of(8, 1).batches(0), 1e-3)


def test_in_backward_refuses_processes_and_fp16_early() -> None:
    section = small_run(*FULL, AS_THEY_COME).optimizer
    require_gradients_one_by_one(section, 1, "bf16")
    with pytest.raises(ConfigError, match=r"not supported with 2 processes: .* or launch\.num_processes=1"):
        require_gradients_one_by_one(section, 2, "bf16")
    with pytest.raises(ConfigError, match=r"not supported with fp16: .* or precision=fp32"):
        require_gradients_one_by_one(section, 1, "fp16")
    require_gradients_one_by_one(small_run().optimizer, 2, "fp16")


STEPS = 3
LITTLE = ("precision=bf16", "precision.trained=bf16", "optimizer.in_backward=true", "training.clip=0")
EVERYTHING = ("eval.every=2", "checkpoint.every=2", "checkpoint.keep=9", "record.every=1")


def rehearsed(loop: Trainer, micro_batches: int = 1) -> Rehearsal:
    parts = loop.parts
    rehearsal = rehearse(parts.stepper, parts.runtime, parts.loader.largest(), micro_batches, parts.try_evaluation)
    loop.progress.depth = rehearsal.depth
    return rehearsal


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def ended(loop_and_notebook: tuple[Trainer, Notebook], folder: Path) -> tuple[list[Any], dict[str, bytes]]:
    """All numbers of a run, and all bytes of its checkpoints."""
    loop, notebook = loop_and_notebook
    assert loop.fit(StopRequest())
    lines = [{k: v for k, v in line.items() if k not in CLOCKS} for line in notebook.steps]
    return [*lines, *notebook.evaluations], files(folder)


@pytest.mark.parametrize(
    "settings",
    [
        ("recipe=full", "optimizer=muon"),
        ("recipe=full", "optimizer=paged_adamw_8bit", *LITTLE),
        ("recipe=lora", "adapter.dropout=0.2"),
        ("recipe=full", "precision=fp16"),
        ("recipe=qlora", "training.recompute=true"),
    ],
    ids=lambda settings: "-".join(word.partition("=")[2] for word in settings),
)
def test_rehearsal_changes_no_number_and_no_checkpoint(
    settings: tuple[str, ...], make_loop: MakeLoop, folder: Path
) -> None:
    check_rehearsal(make_loop, folder, *settings)


def check_rehearsal(make_loop: MakeLoop, folder: Path, *settings: str) -> None:
    run = small_run(*settings, *EVERYTHING)
    torch.manual_seed(5)
    plain = make_loop(run, STEPS)
    torch.manual_seed(5)
    expected, saved = ended(plain, folder)
    for file in sorted(folder.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    torch.manual_seed(5)
    loop_and_notebook = make_loop(run, STEPS)
    torch.manual_seed(5)
    rehearsal = rehearsed(loop_and_notebook[0], micro_batches=2)
    assert (rehearsal.depth, rehearsal.deepened, rehearsal.evaluated) == (0, False, True)
    assert ended(loop_and_notebook, folder) == (expected, saved)
    assert any("optimizer" in name for name in saved)


def test_rehearsal_keeps_restored_optimizer_states(make_loop: MakeLoop) -> None:
    loop, _ = make_loop(small_run("recipe=lora", "eval.every=0", "checkpoint.every=0"), 2)
    loop.fit(StopRequest())
    state = loop.parts.stepper.optimizer.state
    before = {p: {name: value.clone() for name, value in values.items()} for p, values in state.items()}
    rehearsed(loop)
    assert before
    for parameter, values in before.items():
        assert all(torch.equal(state[parameter][name], value) for name, value in values.items())


@pytest.mark.parametrize("where", WHERE)
def test_rehearsal_out_of_memory_splits_before_step_one(where: str, make_loop: MakeLoop) -> None:
    run = small_run("recipe=lora", f"training.recompute={str(where == 'recomputed').lower()}", *EVERYTHING)
    loop, notebook = make_loop(run, STEPS)
    tokens = int(0.8 * loop.parts.loader.largest().ids.numel())
    with scarce(where, tokens) as memory:
        rehearsal = rehearsed(loop)
        assert (rehearsal.depth, rehearsal.deepened) == (1, True)
        assert memory.times >= 1
        before = memory.times
        loop.fit(StopRequest())
    if where == "forward":  # evaluations try each of their batches whole
        assert memory.times - before <= 2 * len(notebook.evaluations)
    else:
        assert memory.times == before, "no step runs out of memory any more"
    message = rehearsal_message(rehearsal)
    assert "rehearsed a step and an evaluation" in message
    assert "fits only in parts: micro-batches are split by document from the first step" in message


def test_rehearsal_recomputes_more_layers_before_it_splits(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    loop, _ = make_loop(small_run("recipe=lora", "training.recompute=1", "eval.every=0", "checkpoint.every=0"), STEPS)
    stepper, forward = loop.parts.stepper, cast("Any", LlamaAttention.__call__)
    more: list[int] = []

    def recompute_more() -> int:
        more.append(recompute_rest(stepper.model.network, 1))
        return more[0]

    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not more:
            raise torch.OutOfMemoryError
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "__call__", limited)  # a module of a run may have a forward of its own
    stepper.recompute_rest = recompute_more
    rehearsal = rehearsed(loop)
    assert (rehearsal.depth, rehearsal.deepened, rehearsal.recomputed_more) == (0, False, 1)
    assert rehearsal_message(rehearsal).endswith("fits, with gradient checkpointing of 1 more layer than estimated")
    assert loop.fit(StopRequest())
    assert stepper.split_depth == 0


def test_rehearsal_finds_evaluation_that_does_not_fit(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = make_loop(small_run("recipe=lora"), STEPS)

    def scores(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(TrainingModel, "scores", scores)
    with pytest.raises(EnvironmentProblem, match=r"a single document of \d+ tokens in an evaluation"):
        rehearsed(loop)
    assert loop.progress.step == 0


def test_rehearsal_finds_states_that_do_not_fit(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = make_loop(small_run("recipe=full", "optimizer=adafactor"), STEPS)

    def step(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(loop.parts.stepper.optimizer, "step", step)
    with pytest.raises(EnvironmentProblem, match="the optimizer step does not fit"):
        rehearsed(loop)


def test_rehearsal_is_due_on_gpu_or_when_asked() -> None:
    asked: Callable[[str], Any] = lambda word: small_run(f"training.rehearse={word}").training  # noqa: E731
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [is_due(asked(word), cpu) for word in ("auto", "true", "false")] == [False, True, False]
    assert [is_due(asked(word), gpu) for word in ("auto", "true", "false")] == [True, True, False]
