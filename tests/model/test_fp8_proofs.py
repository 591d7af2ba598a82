"""The proof of kernels that round rows as they make them: one that is wrong, or does not start, is not used."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.model import fp8, kernels
from app.model.fp8 import epilogue, operations
from app.model.fp8 import proof as proofs
from app.model.fp8.epilogue import Form, RootMeanSquare, SwiGlu
from tests.model.test_fp8 import eight
from tests.model.test_fp8_epilogue import rows_of


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would run kernels, which stand for themselves in plain torch."""
    monkeypatch.setattr(proofs, "can_run", lambda _device: True)
    monkeypatch.setattr(epilogue, "can_run", lambda _device: True)
    monkeypatch.setattr(operations.KERNELS, "refused", set())
    monkeypatch.setattr(operations.KERNELS, "used", True)
    monkeypatch.setattr(proofs, "quantize_by_kernel", operations.quantize_reference)
    for form in (SwiGlu, RootMeanSquare):
        monkeypatch.setattr(form, "by_kernel", form.plain)


@pytest.mark.usefixtures("a_gpu")
def test_kernels_are_proven_for_the_rows_that_layers_read() -> None:
    found = [proof for proof in fp8.prove(eight().network) if "made" in proof.what]
    assert [proof.what for proof in found] == [
        "fp8 norm of 64 made and rounded by a kernel, against torch's own way",
        "fp8 SwiGLU of 128 made and rounded by a kernel, against torch's own way",
    ]
    assert all(proof.holds for proof in found)
    assert not operations.KERNELS.refused


class _CompilationError(Exception):
    """Like Triton's: its text begins with a place, and what is the matter comes last."""

    error_message = "no such cast\non this card"

    def __str__(self) -> str:
        return f"at 3:4:\n    y = x.to(kind)\n{self.error_message}"


def _raise(*_given: Any) -> Any:
    raise _CompilationError


def _a_little_more(form: Form, one: Tensor, other: Tensor) -> Any:
    made, *rest = form.plain(one, other)
    return made * 1.01, *rest


def _other_bytes(form: Form, one: Tensor, other: Tensor) -> Any:
    *rest, out, scales = form.plain(one, other)
    return *rest, out.float().roll(1, 1).to(out.dtype), scales


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("wrong", [_raise, _a_little_more, _other_bytes])
@pytest.mark.parametrize("form", [SwiGlu, RootMeanSquare])
def test_one_that_is_wrong_is_not_used_and_says_why(
    form: type[Form], wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "by_kernel", wrong)
    failed = [proof for proof in fp8.prove(eight().network) if not proof.holds]
    assert [proof.what.split()[1] for proof in failed] == [form.name]
    assert (wrong is _raise) == failed[0].what.endswith("(_CompilationError: no such cast)")
    assert operations.KERNELS.refused == {form.name}
    given = (rows_of(4, 64), rows_of(4, 64, seed=1)) if form is SwiGlu else (rows_of(4, 64), rows_of(64))
    one = SwiGlu() if form is SwiGlu else RootMeanSquare(1e-5, 0)
    found = epilogue._on_gpu(one, *given)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, one.plain(*given), strict=True))


@pytest.mark.usefixtures("a_gpu")
def test_rows_that_are_rounded_wrongly_are_rounded_by_torch_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proofs, "quantize_by_kernel", _raise)
    (failed,) = [proof for proof in fp8.prove(eight().network) if not proof.holds]
    assert failed.what.startswith("fp8 rows of 128 rounded by a kernel")
    assert failed.what.endswith("(_CompilationError: no such cast)")
    assert not operations.KERNELS.used
    monkeypatch.setattr(SwiGlu, "by_kernel", _raise)
    epilogue._on_gpu(SwiGlu(), rows_of(4, 64), rows_of(4, 64))


def test_a_gpu_without_triton_does_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "app.model.kernels.fp8_triton", None)
    monkeypatch.delattr(kernels, "fp8_triton", raising=False)
    monkeypatch.setattr(epilogue, "can_run", lambda _device: False)
    rows = rows_of(4, 64)
    opened, *_ = epilogue._on_gpu(SwiGlu(), rows, rows)
    assert torch.equal(opened, nn.functional.silu(rows) * rows)
    monkeypatch.setattr(epilogue, "can_run", lambda _device: True)
    with pytest.raises(ImportError):
        epilogue._on_gpu(SwiGlu(), rows, rows)
