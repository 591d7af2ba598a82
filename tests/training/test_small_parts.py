"""Plans, precision, the runtime's environment, signals."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.config.schema import AttentionConfig, LaunchConfig, PrecisionConfig, TrainingConfig
from app.distributed.process_group import start
from app.errors import ConfigError
from app.model.attention import BACKENDS, Needs
from app.signals import HEARD, listening
from app.training import precision
from app.training.choices import choose
from app.training.progress import Progress
from app.training.setup import attention_needs
from app.training.steps import plan_steps
from tests.training.conftest import small_run


def training(epochs: float, max_steps: int | None = None) -> TrainingConfig:
    return TrainingConfig(epochs=epochs, max_steps=max_steps, clip=1.0, recompute=False, max_bad_steps=1)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "per_epoch", "steps"),
    [
        (1, None, 10, 10),
        (0.1, None, 30, 3),
        (0.5, None, 5, 3),
        (3, 7, 10, 7),
        (1, 100, 10, 10),
        (0.001, None, 10, 1),
    ],
)
def test_steps_of_a_run(epochs: float, max_steps: int | None, per_epoch: int, steps: int) -> None:
    assert plan_steps(training(epochs, max_steps), per_epoch).steps == steps


@given(st.integers(1, 200), st.integers(1, 10_000))
def test_whole_epochs_are_whole(epochs: int, per_epoch: int) -> None:
    plan = plan_steps(training(epochs), per_epoch)
    assert plan.steps == epochs * per_epoch
    assert plan.epoch(plan.steps) == epochs


def test_a_gain_must_exceed_min_delta() -> None:
    progress = Progress(step=1)
    assert progress.note_eval(2.0, 0.1)
    progress.step = 2
    assert not progress.note_eval(1.95, 0.1)
    assert (progress.evals_without_gain, progress.best_step) == (1, 1)
    assert progress.note_eval(1.8, 0.1)
    assert (progress.evals_without_gain, progress.best_step, progress.last_eval_loss) == (0, 2, 1.8)


def not_needed(precision: str) -> Needs:
    raise AssertionError("a model was built to choose what every model can have")


@pytest.mark.skipif("num_gpus() > 0", reason="tells what a machine without a GPU says")
def test_tf32_is_refused_without_its_hardware() -> None:
    with pytest.raises(ConfigError, match=r"precision=tf32 needs .* Choose precision=fp32"):
        choose(PrecisionConfig(kind="tf32"), AttentionConfig(kind="auto"), not_needed, {})


@pytest.mark.skipif("num_gpus() > 0", reason="tells what a machine without a GPU chooses")
@pytest.mark.parametrize(("flags", "expected"), [("fpu avx2", "fp32"), ("fpu avx512_bf16 amx_bf16", "bf16")])
def test_auto_takes_bf16_only_where_it_is_fast(
    flags: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _self: f"processor : 0\nflags\t\t: {flags}\n")
    assert precision.choose_precision(PrecisionConfig(kind="auto")) == expected


def test_a_continued_run_keeps_what_auto_meant() -> None:
    kept = {"precision": "fp16", "attention": "sdpa"}
    auto = PrecisionConfig(kind="auto"), AttentionConfig(kind="auto")
    assert choose(*auto, not_needed, kept).precision == "fp16"
    assert choose(PrecisionConfig(kind="fp32"), auto[1], not_needed, kept).precision == "fp32"


def test_a_run_on_a_gpu_asks_its_model_what_attention_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, replace(backend, requires=lambda _device: []))
    for overrides, expected in (((), "flash"), (("batching.packing=false",), "sdpa")):
        run = small_run("precision=bf16", "attention=auto", *overrides)
        chosen = choose(run.precision, run.attention, partial(attention_needs, run), {})
        assert chosen.attention == expected
    kept = {"precision": "fp32", "attention": "varlen"}
    auto = small_run("precision=auto", "attention=auto")
    with pytest.raises(ConfigError, match="attention=varlen cannot do float32 arithmetic"):
        choose(auto.precision, auto.attention, partial(attention_needs, auto), kept)


def test_accelerate_does_not_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment would divide our loss, or choose a precision of its own."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    runtime = start(LaunchConfig(num_processes=1, threads=1), "fp32", seed=3)
    assert runtime.accelerator.gradient_accumulation_steps == 1
    assert runtime.accelerator.mixed_precision == "no"
    loss = torch.ones((), requires_grad=True)
    runtime.accelerator.backward(loss * 1.0)
    assert float(loss.grad or 0) == 1.0
    assert (runtime.processes, runtime.rank, runtime.threads) == (1, 0, 1)
    assert runtime.peers.totals([1, 2.5]) == [1.0, 2.5]
    assert runtime.peak_memory_bytes() > 10_000_000
    drawn = torch.rand(2)
    start(LaunchConfig(num_processes=1, threads=1), "fp32", seed=3)
    assert torch.equal(torch.rand(2), drawn)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)]
)
def test_a_signal_asks_and_once_it_has_nothing_but_ctrl_c_kills_who_ends(number: int, code: int) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    with listening():
        pass
    assert {each: signal.getsignal(each) for each in before} == before
    with listening() as request:
        assert request.exit_code is None
        os.kill(os.getpid(), number)
        assert request.exit_code == code
    for each in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), each)
    assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]


def test_a_second_ctrl_c_does_not_wait(capfd: pytest.CaptureFixture[str]) -> None:
    with listening(speaks=True) as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.exit_code == 130
        assert capfd.readouterr().err == HEARD
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
