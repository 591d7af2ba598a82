"""cuDNN's kernel behind torch's variable-length attention: what it is given, and when it is not taken."""

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.batch import PackedSequences
from app.config.schema import AttentionConfig
from app.errors import ConfigError
from app.model.attention import BACKENDS, needs_of, select, varlen
from app.model.attention.varlen import cudnn_kernel, cudnn_requires
from app.model.load_base import build_on_meta
from tests.model.small import CAUSAL, model_config
from tests.model.stand_ins import CUDNN, NEEDS, torch_2_15
from tests.model.test_varlen_attention import DOCUMENTS, PLAIN, heads

GPU = torch.device("cuda")
KERNEL = cudnn_kernel(torch_2_15, CUDNN)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had one, the newest torch and the newest cuDNN."""
    monkeypatch.setattr(varlen, "missing_gpu", lambda _device: [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(varlen, "_cudnn_operation", lambda: torch_2_15)


@pytest.mark.usefixtures("hopper")
def test_a_machine_that_has_everything_lacks_nothing() -> None:
    assert cudnn_requires(GPU) == []
    assert select(AttentionConfig(kind="cudnn"), GPU, lambda: NEEDS) == "cudnn"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("where", "name", "value", "words"),
    [
        (torch.cuda, "get_device_capability", lambda _device: (8, 9), "Hopper or Blackwell"),
        (torch.cuda, "get_device_capability", lambda _device: (12, 0), "Hopper or Blackwell"),
        (varlen, "missing_gpu", lambda _device: ["a GPU"], "Hopper or Blackwell"),
        (varlen, "_cudnn_operation", lambda: None, f"torch 2.15 or newer (this is {torch.__version__})"),
        (torch.backends.cudnn, "version", lambda: 91002, "cuDNN 9.18 or newer (here it is 9.10)"),
        (torch.backends.cudnn, "version", lambda: None, "cuDNN 9.18 or newer (here it is missing)"),
    ],
)
def test_what_is_missing_is_named(
    where: Any, name: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    (missing,) = cudnn_requires(GPU)
    assert words in missing


@pytest.mark.parametrize(("arguments", "there"), [(("query", "backend"), True), (("query",), False)])
def test_an_operation_that_cannot_be_told_is_never_taken(
    arguments: tuple[str, ...], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_module("torch.nn.attention.varlen")  # it looks at what is replaced
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in arguments])
    operation: Any = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    monkeypatch.setattr(torch.ops, "torch_attn", SimpleNamespace(_varlen_attn=operation))
    assert (varlen._cudnn_operation() is operation) == there


@pytest.mark.usefixtures("hopper")
def test_auto_does_not_take_what_no_gpu_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash", "varlen"):
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], requires=lambda _device: ["a package"]))
    assert select(AttentionConfig(kind="auto"), GPU, lambda: NEEDS) == "sdpa"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": True}, "sliding windows"),
        ({"key_size": 256, "value_size": 256}, r"heads of 256 numbers \(multiples of 8 up to 128\)"),
        ({"softcap": True}, "soft-capping"),
        ({"compute": None}, "float32 arithmetic"),
    ],
)
def test_it_says_what_it_cannot_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"attention=cudnn cannot do {words}.*Set attention=sdpa"):
        select(AttentionConfig(kind="cudnn"), GPU, lambda: replace(NEEDS, **changes))


@pytest.mark.parametrize(
    ("kind", "longest", "has"),
    [("mistral", None, True), ("mistral", 1000, True), ("mistral", 2, False), ("llama", None, False)],
)
def test_a_window_counts_where_it_cuts_rows(kind: str, longest: int | None, has: bool) -> None:
    lm = build_on_meta(model_config(kind), CAUSAL, "eager")
    assert needs_of(lm, torch.bfloat16, packed=True, longest=longest).window == has


def test_no_document_is_said_to_be_shorter_than_cudnn_can_do() -> None:
    told: list[int] = []

    def spy(query: Tensor, _key: Tensor, _value: Tensor, **named: Any) -> Tensor:
        told.extend((named["max_q"], named["max_k"]))
        return query

    q, k, v = heads()
    for longest in (64, 2048):
        documents = PackedSequences.from_lengths(DOCUMENTS.lengths, longest)
        cudnn_kernel(spy, CUDNN)(q, k, v, PLAIN, documents)
    assert told == [129, 129, 2048, 2048]
