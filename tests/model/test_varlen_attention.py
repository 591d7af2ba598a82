"""Kernels that take all documents in one call, by stand-ins with their signatures."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.base.base_model import BaseModel
from app.batch import PackedSequences
from app.config.schema import AttentionConfig, ModelConfig
from app.errors import ConfigError
from app.layers.attention import BACKENDS, Backend, register, select, varlen
from app.layers.attention.requirements import Kernel, Needs, Rules, needs_of
from app.layers.attention.sdpa import sdpa
from app.layers.attention.varlen import varlen_kernel, varlen_requires
from scripts.tiny_kinds import architecture
from tests.choices import pairwise
from tests.model import stand_ins
from tests.model.small import CAUSAL, KINDS, built, model_config
from tests.model.stand_ins import NEEDS
from tests.model.test_attention import PLAIN, gradient_of, largest, separate, side_by_side

LENGTHS = (20, 1, 11, 5)
DOCUMENTS = PackedSequences.from_lengths(LENGTHS, max_seqlen=64, max_documents=7)
TORCH: list[Callable[..., Any]] = [stand_ins.torch_2_11, stand_ins.torch_2_13]
FLASH: list[Callable[..., Any]] = [stand_ins.flash_2, stand_ins.flash_3, varlen.flash4_attention]
FLASH_4 = stand_ins.Flash4.flash_attn_varlen_func
CPU, GPU, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


@pytest.fixture(autouse=True)
def _flash_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", stand_ins.Flash4)


def kernel(function: Callable[..., Any]) -> Kernel:
    return varlen_kernel("varlen" if function in TORCH else "flash", function)


def heads(query: int = 4, key: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """[1, H, T, D] as models make them: a view of [1, T, H * D]."""
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    made = (torch.randn(1, total, n * 8, generator=generator).to(dtype) for n in (query, key, key))
    return [t.view(1, total, -1, 8).transpose(1, 2).requires_grad_() for t in made]


def with_gradients(run: Kernel, rules: Rules, key_heads: int) -> list[Tensor]:
    q, k, v = heads(4, key_heads)
    out = run(q, k, v, rules, DOCUMENTS)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weight).sum(), (q, k, v))]


@pytest.mark.parametrize(
    ("window", "function", "key_heads", "causal"),
    pairwise([None, 1, 3, 20, 64, 100], [*TORCH, *FLASH], [1, 2, 4], [True, False]),
)
def test_varlen_kernel_equals_sdpa_of_each_document(
    function: Callable[..., Any], causal: bool, window: int | None, key_heads: int
) -> None:
    softcap = 1.5 if function in FLASH and causal else None
    rules = replace(PLAIN, causal=causal, window=window, scale=0.7, softcap=softcap)
    ours = with_gradients(kernel(function), rules, key_heads)
    assert largest(ours, with_gradients(sdpa, rules, key_heads)) <= 1e-5


@pytest.mark.parametrize("window", [None, 3])
def test_flash_4_in_one_graph_equals_uncompiled(window: int | None) -> None:
    """Inputs with other strides than the gradients that the operation returns."""
    rules = replace(PLAIN, window=window, scale=0.7)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = kernel(varlen.flash4_attention)(q.contiguous() * 2, k.sin(), v, rules, DOCUMENTS)
        return out.relu()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    inputs = heads()
    ours, expected = ([out, *torch.autograd.grad(out.sum(), inputs)] for out in (compiled(*inputs), layer(*inputs)))
    assert largest(ours, expected) <= 1e-6


def test_flash_4_operation_is_registered_correctly() -> None:
    q, k, v = (t.detach()[0].transpose(0, 1).requires_grad_() for t in heads())
    rules = (DOCUMENTS.cu_seqlens, DOCUMENTS.max_seqlen, None, True, 2, 0, 1.5)
    torch.library.opcheck(torch.ops.app.flash4, (q, k, v, *rules))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], str]]:
    """Registers a kernel as a backend; sdpa is back afterwards."""

    def registered(run: Kernel) -> str:
        monkeypatch.setitem(BACKENDS, "stand_in", Backend(run=run, requires=lambda _device: []))
        return register("stand_in")

    yield registered
    register("sdpa")


@pytest.mark.parametrize(
    ("function", "kind"), [(TORCH[0], "mistral"), (TORCH[1], "gpt2"), (FLASH[0], "llama"), (FLASH[1], "gemma2")]
)
def test_model_with_varlen_kernel_equals_own_eager_attention(
    function: Callable[..., Any], kind: str, stand_in: Callable[[Kernel], str]
) -> None:
    lm = built(kind)
    alone = separate(lm)
    expected = gradient_of(lm, alone)
    stand_in(kernel(function))
    ours = side_by_side(lm)
    assert largest(ours, alone) <= 1e-5
    found = gradient_of(lm, ours)
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) <= 1e-3


def test_varlen_kernel_arguments_fit_installed_torch() -> None:
    from torch.nn.attention.varlen import varlen_attn

    real, calls = inspect.signature(varlen_attn), []

    def spy(query: Tensor, *args: Any, **named: Any) -> Tensor:
        calls.append(real.bind(query, *args, **named))
        return query

    spy.__signature__ = real  # type: ignore[attr-defined]
    q, k, v = heads()
    varlen_kernel("varlen", spy)(q, k, v, replace(PLAIN, window=3), DOCUMENTS)
    given = calls[0].arguments
    assert given["window_size"] == (2, 0)
    assert given["max_q"] == given["max_k"] == 64
    assert given["cu_seq_q"].tolist() == [0, 20, 21, 32, 37, 37, 37, 37]
    assert given.get("enable_gqa", False) is ("enable_gqa" in real.parameters)  # torch 2.11 has no word for it
    ours = stand_ins.torch_2_13 if "enable_gqa" in real.parameters else stand_ins.torch_2_11
    known = inspect.signature(ours).parameters
    assert real.parameters.keys() >= known.keys(), "the stand-in has an argument that torch has not"


def blind(function: Callable[..., Any]) -> Callable[..., Any]:
    """The signature of `function`, with results of the right shape whatever the values are."""

    @functools.wraps(function)
    def answer(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        inspect.signature(function).bind(query, key, value, *args, **named)
        return query + key.sum() + value.sum()

    return answer


@pytest.mark.parametrize(
    ("function", "kind"), [(None, "mistral"), (TORCH[0], "mistral"), *((f, "llama") for f in FLASH)]
)
def test_attention_on_meta_reads_no_value_of_device(
    function: Callable[..., Any] | None, kind: str, stand_in: Callable[[Kernel], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is read would be waited for in every layer; on `meta` there is none to read."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_device: False)  # `meta` has none to ask for
    name = "varlen" if function in TORCH else "flash"
    run = sdpa if function is None else varlen_kernel(name, blind(function))
    lm = BaseModel(model_config(kind), CAUSAL).on_meta(stand_in(run))
    ids = torch.zeros(1, sum(LENGTHS), dtype=torch.long, device=META)
    documents = PackedSequences.from_lengths(LENGTHS, max_seqlen=40, max_documents=9).to(META)
    with pytest.raises((RuntimeError, NotImplementedError)):
        documents.cu_seqlens[-1].item()
    hidden = lm.base_model(input_ids=ids, position_ids=ids, use_cache=False, documents=documents)[0]
    hidden.sum().backward()
    assert hidden.shape[:2] == ids.shape


@pytest.mark.parametrize("function", [TORCH[1], FLASH[1]])
def test_varlen_kernel_shapes_and_host_values_same_in_every_batch(function: Callable[..., Any]) -> None:
    given = []

    def spy(query: Tensor, _key: Tensor, _value: Tensor, *args: Any, **named: Any) -> Tensor:
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else each for each in (*args, *named.values())]
        given.append((tuple(query.shape), shapes))
        return query

    spy.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    for lengths in ((20, 1, 11, 32), (40, 24), (10,) * 6 + (4,)):
        documents = PackedSequences.from_lengths(lengths, max_seqlen=40, max_documents=9)
        q, k, v = (torch.zeros(1, heads, 64, 8) for heads in (4, 2, 2))
        varlen_kernel("varlen" if function in TORCH else "flash", spy)(q, k, v, PLAIN, documents)
    assert given[0] == given[1] == given[2]


@pytest.mark.parametrize("function", [TORCH[1], FLASH[1]])
def test_varlen_kernel_dtype_is_that_of_autocast(function: Callable[..., Any]) -> None:
    """Norms and rotary embeddings with float32 weights widen q and k, and autocast does not know these kernels."""
    q, k, v = heads()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernel(function)(q, k, v.bfloat16(), PLAIN, DOCUMENTS)
        reference = sdpa(q, k, v.bfloat16(), PLAIN, DOCUMENTS)
    assert out.dtype == reference.dtype == torch.bfloat16
    assert largest([out.float()], [reference.float()]) <= 0.02


@pytest.mark.parametrize("function", [TORCH[1], FLASH[1]])
def test_varlen_kernel_padded_rows_go_to_sdpa(function: Callable[..., Any]) -> None:
    q, k, v = (torch.cat([t, t.flip(2)]) for t in heads())
    assert torch.equal(kernel(function)(q, k, v, PLAIN, None), sdpa(q, k, v, PLAIN, None))


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [
        (TORCH[1], {"softcap": 1.0}, "attention=varlen does not support soft-capping"),
        (TORCH[1], {"sinks": torch.zeros(4)}, "attention=varlen does not support attention sinks"),
        (FLASH[0], {"dropout": 0.1}, "attention=flash does not support dropout of attention"),
    ],
)
def test_varlen_kernel_unknown_rule_is_refused(
    function: Callable[..., Any], changes: dict[str, Any], words: str
) -> None:
    q, k, v = heads()
    with pytest.raises(ConfigError, match=f"{words}.*Set attention=sdpa"):
        kernel(function)(q, k, v, replace(PLAIN, **changes), DOCUMENTS)


@pytest.fixture
def rich_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that backends require is installed."""
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, replace(backend, requires=lambda _device: []))


@pytest.mark.usefixtures("rich_machine")
@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "flash"),
        ({"compute": torch.float16, "softcap": True}, "flash"),
        ({"sinks": True}, "sdpa"),
        ({"dropout": True}, "sdpa"),
        ({"compute": None}, "sdpa"),
        ({"packed": False}, "sdpa"),
        ({"heads": {(12, 12)}}, "sdpa"),
        ({"heads": {(256, 256), (320, 320)}}, "sdpa"),
        ({"heads": {(192, 128)}}, "sdpa"),
    ],
)
def test_auto_attention_takes_first_backend_that_serves_all_needs(changes: dict[str, Any], chosen: str) -> None:
    assert select(AttentionConfig(kind="auto"), GPU, lambda: replace(NEEDS, **changes)) == chosen


@pytest.mark.usefixtures("rich_machine")
def test_auto_attention_without_flash_attn_takes_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(BACKENDS["flash"], requires=lambda _device: ["the package"])
    monkeypatch.setitem(BACKENDS, "flash", absent)
    assert select(AttentionConfig(kind="auto"), GPU, lambda: NEEDS) == "varlen"
    assert select(AttentionConfig(kind="auto"), GPU, lambda: replace(NEEDS, softcap=True)) == "sdpa"


@pytest.mark.usefixtures("rich_machine")
@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("varlen", {"softcap": True, "compute": None}, "float32 arithmetic .* and soft-capping"),
        ("flash", {"packed": False, "sinks": True}, r"padded rows \(batching\.packing=false\) and attention sinks"),
        ("varlen", {"heads": {(12, 12)}}, "heads of size 12"),
    ],
)
def test_named_backend_that_cannot_serve_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"attention={kind} does not support {words}.*Set attention=sdpa"):
        select(AttentionConfig(kind=kind), GPU, lambda: replace(NEEDS, **changes))


def test_cpu_attention_is_sdpa_without_building_a_model() -> None:
    def not_needed() -> Needs:
        raise AssertionError("asked for the needs")

    for kind in ("auto", "sdpa"):
        assert select(AttentionConfig(kind=kind), CPU, not_needed) == "sdpa"
    for kind in ("varlen", "flash"):
        with pytest.raises(ConfigError, match=f"attention={kind} needs an NVIDIA GPU .*Set attention=sdpa"):
            select(AttentionConfig(kind=kind), CPU, not_needed)


def old(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int
) -> Tensor:
    raise AssertionError("has neither scale nor window")


def test_varlen_requires_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "missing_gpu", lambda _device: [])
    assert varlen_requires("varlen", GPU) == []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old)
    assert "torch 2.11 or newer" in varlen_requires("varlen", GPU)[0]


@pytest.mark.parametrize(
    ("generation", "third", "second", "fourth", "expected"),
    [
        (9, stand_ins.flash_3, stand_ins.flash_2, FLASH_4, stand_ins.flash_3),
        (8, stand_ins.flash_3, stand_ins.flash_2, FLASH_4, stand_ins.flash_2),
        (9, None, stand_ins.flash_2, FLASH_4, varlen.flash4_attention),
        (9, None, stand_ins.flash_2, None, stand_ins.flash_2),
        (8, None, old, None, None),
        (8, stand_ins.flash_3, None, FLASH_4, None),
        (9, None, old, FLASH_4, varlen.flash4_attention),
        (10, stand_ins.flash_3, stand_ins.flash_2, FLASH_4, varlen.flash4_attention),
        (10, stand_ins.flash_3, stand_ins.flash_2, None, stand_ins.flash_2),
        (12, stand_ins.flash_3, stand_ins.flash_2, FLASH_4, stand_ins.flash_2),
        (12, None, None, FLASH_4, None),
    ],
)
def test_flash_attn_version_that_fits_gpu_is_taken(
    generation: int, third: Any, second: Any, fourth: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (generation, 0))
    monkeypatch.setattr(varlen, "missing_gpu", lambda _device: [])
    for name, function in (("flash_attn_interface", third), ("flash_attn", second), ("flash_attn.cute", fourth)):
        module = None if function is None else SimpleNamespace(flash_attn_varlen_func=function)
        monkeypatch.setitem(sys.modules, name, module)  # None: importing it fails
    assert varlen.find_flash(GPU) is expected
    assert bool(varlen_requires("flash", GPU)) is (expected is None)


@pytest.mark.parametrize("kind", [*KINDS, "deepseek_v3"])
def test_needs_read_from_model_on_meta(kind: str) -> None:
    given = model_config(kind)
    if kind == "gpt2":
        given.architecture["attn_pdrop"] = 0.1
    needs = needs_of(BaseModel(given, CAUSAL).on_meta(), torch.bfloat16, packed=True)
    assert needs.softcap == (kind == "gemma2")
    assert needs.sinks == (kind == "gpt_oss")
    assert needs.dropout == (kind == "gpt2")
    assert needs.heads == {(16, 12) if kind == "deepseek_v3" else (8, 8)}


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("gemma4_text", {(16, 16), (512, 512)}),  # by layer: its configuration has no one number
        ("qwen3_vl", {(16, 16)}),  # the numbers of the decoder stand in a part of its configuration
        ("mimo_v2_flash", {(16, 24)}),
        ("mamba", set()),
    ],
)
def test_needs_of_kinds_whose_configuration_has_no_plain_head_size(kind: str, heads: set[tuple[int, int]]) -> None:
    numbers = architecture(kind) | ({"v_head_dim": 24} if kind == "mimo_v2_flash" else {})
    given = ModelConfig(path="asset:tiny", weights="random", architecture=numbers)
    assert needs_of(BaseModel(given, CAUSAL).on_meta(), torch.bfloat16, packed=True).heads == heads
