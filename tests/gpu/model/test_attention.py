"""Attention on a GPU: the real kernels, steps without device syncs, constant memory."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.batch import Batch, PackedSequences
from app.config.schema import AttentionConfig, LaunchConfig
from app.distributed.process_group import Runtime, start
from app.layers.attention import BACKENDS, select
from app.layers.attention.requirements import Rules
from app.layers.attention.sdpa import plain, sdpa
from app.model.training_model import TrainingModel
from app.optim.optimizers import build_optimizer
from app.training.train_step import Stepper
from tests.gpu import waiting_is_an_error
from tests.harness.marks import requires_flash_4, requires_flash_attention
from tests.model import small
from tests.model.small import build_model
from tests.model.stand_ins import NEEDS
from tests.optim.small import section

LENGTHS = (2000, 1, 7, 64, 129, 513, 1024, 2, 300, 56)
LONGEST = 2048
PLAIN = Rules(causal=True, scale=None, dropout=0.0, window=None, softcap=None, sinks=None)
VARLEN = [pytest.param("varlen"), pytest.param("flash", marks=requires_flash_attention)]


def gpu() -> torch.device:
    return torch.device("cuda")


def documents(lengths: tuple[int, ...] = LENGTHS, places: int = 16) -> PackedSequences:
    return PackedSequences.from_lengths(lengths, LONGEST, places).to(gpu())


def heads(key_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """[1, H, T, D] as models make them: a view of [1, T, H * D]."""
    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(LENGTHS)
    made = [
        torch.randn(1, total, n, size, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (8, key_heads, key_heads)
    ]
    q, k, v = (t.transpose(1, 2) for t in made)
    return q, k, v


def outcome(run: Any, inputs: tuple[Tensor, ...], rules: Rules) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = run(*leaves, rules, documents())
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(out.shape, generator=generator, device="cuda", dtype=torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, rules: Rules, packed: PackedSequences) -> Tensor:
    split = (t.split(packed.lengths, dim=2) for t in (q, k, v))
    return torch.cat([plain(a, b, c, rules) for a, b, c in zip(*split, strict=True)], dim=2)


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]


def check(backend: str, rules: Rules, key_heads: int, size: int = 64) -> None:
    """No more than three times as far from the definition as torch's own dense attention."""
    inputs = heads(key_heads, size)
    exact = outcome(by_definition, tuple(t.double() for t in inputs), rules)
    dense = errors(outcome(sdpa, inputs, rules), exact)
    ours = errors(outcome(BACKENDS[backend].run, inputs, rules), exact)
    for mine, allowed in zip(ours, dense, strict=True):
        assert mine <= 3 * max(allowed, 2**-9), (ours, dense)


@pytest.mark.parametrize("backend", VARLEN)
@pytest.mark.parametrize("key_heads", [1, 2, 8])
@pytest.mark.parametrize("window", [None, 2, 100, 3000])
def test_varlen_kernel_forward_and_backward_follow_definition(backend: str, key_heads: int, window: int | None) -> None:
    assert BACKENDS[backend].requires(gpu()) == []
    check(backend, replace(PLAIN, window=window, scale=0.2), key_heads)


@pytest.mark.parametrize("backend", VARLEN)
@pytest.mark.parametrize("size", [8, 96, 128, 256])
def test_varlen_kernel_accepted_head_sizes_follow_definition(backend: str, size: int) -> None:
    check(backend, PLAIN, 2, size)


@pytest.mark.parametrize("backend", VARLEN)
@pytest.mark.parametrize("window", [None, 100])
def test_varlen_kernel_bidirectional_follows_definition(backend: str, window: int | None) -> None:
    check(backend, replace(PLAIN, causal=False, window=window), 2)


@requires_flash_attention
@pytest.mark.parametrize("window", [None, 100])
def test_flash_soft_capping_follows_definition(window: int | None) -> None:
    check("flash", replace(PLAIN, softcap=5.0, window=window), 2)


@requires_flash_4
@pytest.mark.parametrize("window", [None, 100])
def test_flash_4_operation_returns_registered_shapes_and_strides(window: int | None) -> None:
    q, k, v = (t[0].transpose(0, 1).requires_grad_() for t in heads(2, 64))
    rules = (documents().cu_seqlens, LONGEST, None, True, window, 0, 0.0)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.app.flash4, (q, k, v, *rules), test_utils=checks)


@pytest.mark.parametrize("backend", VARLEN)
def test_varlen_kernel_empty_documents_change_nothing(backend: str) -> None:
    inputs = heads(2, 64)
    few, many = (BACKENDS[backend].run(*inputs, PLAIN, documents(places=places)) for places in (len(LENGTHS), 200))
    assert errors([few], [many.double()])[0] <= 2**-8


def test_auto_backend_is_first_that_gpu_has() -> None:
    found = [name for name in ("flash", "varlen", "sdpa") if not BACKENDS[name].requires(gpu())]
    assert select(AttentionConfig(kind="auto"), gpu(), lambda: NEEDS) == found[0]
    assert select(AttentionConfig(kind="auto"), gpu(), lambda: replace(NEEDS, sinks=True)) == "sdpa"


def training_model_with(backend: str, kind: str, adapter: Any, precision: str = "bf16") -> TrainingModel:
    parts = small.sections(small.model_config(kind), adapter, precision)
    return build_model(replace(parts, attention=backend), gpu(), seed=0, base_path="base")


def packed_batch(step: int) -> Batch:
    """Documents of other lengths at each step, as many and with as many labels."""
    drawn = random.Random(step)
    apart = [drawn.randrange(1, 20) for _ in range(8)]
    batch = small.packed(small.documents_of(tuple(n for d in apart for n in (40 + d, 40 - d)), seed=step))
    assert batch.documents is not None
    return replace(batch, documents=PackedSequences.from_lengths(batch.documents.lengths, 64, 20))


def gradient(backend: str, kind: str, precision: str) -> dict[str, Tensor]:
    training_model = training_model_with(backend, kind, small.full(), precision)
    loss, labels = training_model(packed_batch(0).to(gpu()))
    (loss / labels).backward()
    return small.gradients(training_model)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("varlen", kind) for kind in ("llama", "qwen3", "mistral")),
        *(
            pytest.param("flash", kind, marks=requires_flash_attention)
            for kind in ("llama", "qwen3", "mistral", "gemma2")
        ),
    ],
)
def test_packed_step_gradient_equals_sdpa(backend: str, kind: str) -> None:
    exact = gradient("sdpa", kind, "fp32")
    dense = small.distance(gradient("sdpa", kind, "bf16"), exact)
    assert small.distance(gradient(backend, kind, "bf16"), exact) <= 3 * dense


def stepper_with(backend: str) -> tuple[Stepper, Runtime]:
    runtime = start(LaunchConfig(num_processes=1, threads=1), "bf16", seed=0)
    training_model = training_model_with(backend, "llama", small.lora())
    optimizer = build_optimizer(section("adamw"), training_model)
    return Stepper(training_model, optimizer, runtime, 1.0, fp16=False), runtime


@pytest.mark.parametrize("backend", ["sdpa", *VARLEN])
def test_packed_steps_without_device_sync(backend: str) -> None:
    stepper, runtime = stepper_with(backend)
    for step in range(3):
        stepper.run([packed_batch(step), packed_batch(step + 100)], 1e-3)
    torch.cuda.synchronize(runtime.device)
    with waiting_is_an_error():
        results = [stepper.run([packed_batch(step), packed_batch(step + 100)], 1e-3) for step in range(3, 8)]
    assert all(bool(torch.isfinite(result.loss_sum)) for result in results)


@pytest.mark.parametrize("backend", VARLEN)
def test_reserved_memory_constant_over_steps(backend: str) -> None:
    stepper, runtime = stepper_with(backend)
    reserved = []
    for step in range(10):
        stepper.run([packed_batch(step)], 1e-3)
        reserved.append(torch.cuda.memory_reserved(runtime.device))
    assert len(set(reserved[3:])) == 1, reserved


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, None), (torch.bfloat16, 100), (torch.float32, None)])
def test_sdpa_of_shared_heads_needs_no_plain_arithmetic(dtype: torch.dtype, window: int | None) -> None:
    rules = replace(PLAIN, window=window)
    inputs = heads(2, 64)
    exact = outcome(by_definition, tuple(t.double() for t in inputs), rules)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = outcome(sdpa, tuple(t.to(dtype) for t in inputs), rules)
    assert max(errors(found, exact)) < 0.03
