"""What is remembered of an operation is what torch would work out: form, storage, and which tensor it is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from app.plan import remembering, trace
from app.plan.fakes import AnyNumber
from app.plan.planner import plan_memory
from app.plan.remembering import Remembering
from tests.plan.truth import PACKED, PADDED, small_run

Operation = Callable[[Tensor, Tensor], Any]

OPERATIONS: dict[str, Operation] = {
    "a sum": lambda a, b: a + b,
    "a product": lambda a, b: a @ b,
    "a number": lambda a, _: a * 2,
    "a fraction": lambda a, _: a * 2.0,
    "of whole numbers by a whole one": lambda a, _: torch.ones_like(a, dtype=torch.int64) * 2,
    "of whole numbers by a fraction": lambda a, _: torch.ones_like(a, dtype=torch.int64) * 2.0,
    "of whole numbers by a truth": lambda a, _: torch.ones_like(a, dtype=torch.int64) + True,
    "in place": lambda a, b: a.add_(b),
    "a view": lambda a, _: a.view(-1),
    "a view from the middle": lambda a, _: a[1:3, 2:],
    "turned": lambda a, _: a.t(),
    "turned and multiplied": lambda a, b: a.t() @ b,
    "spread": lambda a, _: a[0].expand(5, 8),
    "parts": lambda a, _: a.split(4, dim=1),
    "several": lambda a, _: torch.topk(a, 2),
    "norms": lambda a, b: torch.native_layer_norm(a, [8], b[0], None, 1e-5),
    "16 bits": lambda a, _: a.to(torch.bfloat16),
    "the same type": lambda a, _: a.to(torch.float32),
    "a new one": lambda a, _: torch.empty(3, 5, dtype=a.dtype),
    "strange strides": lambda a, _: torch.empty_strided((2, 3), (7, 2), dtype=a.dtype),
    "nothing": lambda a, b: torch._foreach_add_([a, b], 1.0),
    "a list": lambda a, b: torch._foreach_mul([a, b], 2.0),
    "its rows": lambda a, _: F.embedding(torch.zeros(2, 3, dtype=torch.int64), a),
    "put together": lambda a, b: torch.cat([a, b, a]),
    "imaginary": lambda a, _: torch.view_as_complex(a.view(8, 4, 2)).conj().imag,
    "let go": lambda a, _: a.detach(),
    "of a weight": lambda a, b: F.linear(b, nn.Parameter(a)).sum(),
    "grown": lambda a, _: a.resize_(16, 8),
    "half and the whole": lambda a, b: (a[:4], torch.mul(a[:4], b[:4])),
}


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembering, "_ANSWERS", {})


@contextmanager
def _remembering() -> Iterator[None]:
    with FakeTensorMode() as fakes, AnyNumber(Remembering(fakes)):
        yield


def _seen(out: Any, given: tuple[Tensor, Tensor]) -> Any:
    """All that can be told of what came out."""
    if isinstance(out, list | tuple):
        return [type(out), *(_seen(each, given) for each in out)]
    if not isinstance(out, Tensor):
        return out
    storage = out.untyped_storage()
    form = tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, str(out.device), out.requires_grad
    places = [each.untyped_storage()._cdata == storage._cdata for each in given]
    return *form, storage.nbytes(), places, [each is out for each in given], out.is_conj(), out.is_neg()


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_second_time_is_as_the_first_and_as_torch(name: str) -> None:
    seen = []
    for calls in (FakeTensorMode(), _remembering(), _remembering()):
        with calls, torch.no_grad():
            given = torch.empty(8, 8), torch.empty(8, 8)
            seen.append([_seen(OPERATIONS[name](*given), given), *(_seen(each, given) for each in given)])
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


def test_gradients_are_of_the_same_forms() -> None:
    found = []
    for _ in range(2):
        with _remembering():
            weight = nn.Parameter(torch.empty(8, 8))
            F.silu(torch.empty(2, 8) @ weight).sum().backward()
            assert weight.grad is not None
            found.append(
                (weight.grad.shape, weight.grad.dtype, weight.requires_grad, weight.grad.requires_grad)
            )
    assert found[0] == found[1]


def test_a_view_of_one_of_two_that_share_a_storage_is_not_remembered() -> None:
    """Which of them it is a view of cannot be told, and the next two may not share."""
    with FakeTensorMode() as mode:
        fakes = remembering._Fakes(mode)
        one, other = torch.empty(4, 4), torch.empty(4, 4)
        assert remembering._of_one(fakes, one.view(-1), [one, other]) is not None
        assert remembering._of_one(fakes, one.view(-1), [one, one]) is not None
        assert remembering._of_one(fakes, one.view(-1), [one, one.t()]) is None


def test_a_fake_is_as_its_constructor_makes_it() -> None:
    """What is copied from the first one is the same of every one; its memory and its memos are its own."""
    mode = FakeTensorMode()
    fakes = remembering._Fakes(mode)
    for device in map(torch.device, ("cpu", "meta")):
        mode.allow_meta = True
        inner = [torch.empty_strided((2, 3), (4, 1), dtype=torch.bfloat16, device="meta") for _ in range(3)]
        made: list[Any] = [fakes.fake(each, device) for each in inner]
        whole = FakeTensor(mode, inner[0], device)
        for each, own in zip(made, inner, strict=True):
            assert (type(each), vars(each), each.device) == (FakeTensor, vars(whole), device)
            assert each.untyped_storage()._cdata == own.untyped_storage()._cdata
            assert torch._C._dispatch_keys(each) == torch._C._dispatch_keys(whole)
            assert each.stride() == (4, 1)
        made[1]._item_memo = 3
        assert [each._item_memo for each in (made[0], made[2])] == [None, None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch was asked."""
    names: list[str] = []
    own = FakeTensorMode.dispatch

    def noted(self: FakeTensorMode, func: Any, *rest: Any) -> Any:
        names.append(str(func))
        return own(self, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    return names


@pytest.mark.parametrize("recipe", ["full", "lora", "qlora"])
def test_a_second_plan_asks_torch_next_to_nothing(recipe: str, asked: list[str]) -> None:
    run = small_run(f"recipe={recipe}", "precision=bf16")
    plan_memory(run, PACKED)
    first = len(asked)
    asked.clear()
    plan_memory(run, PACKED)
    assert len(asked) < 0.15 * first, sorted(set(asked))


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("shape", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("recipe", ["full", "lora", "qlora"])
def test_a_plan_is_that_of_torchs_own_fakes(
    recipe: str, shape: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last event, and the second one too, all of which is remembered."""
    run = small_run(f"recipe={recipe}", "precision=bf16", "optimizer=paged_adamw_8bit")
    plans = [plan_memory(run, shape, device) for _ in range(2)]
    monkeypatch.setattr(trace, "Remembering", lambda _: lambda func, args, kwargs: func(*args, **kwargs))
    own = plan_memory(run, shape, device)
    assert plans[0] == own
    assert plans[1] == own
