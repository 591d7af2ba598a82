"""Rows that are rounded as they are made: the same numbers to the last bit, and fewer launches."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.batch import Batch
from app.engine.counting import StorageCounter
from app.model import fp8
from app.model.fp8 import Fp8Linear
from app.model.fp8.epilogue import Form, RootMeanSquare, SwiGlu, is_silu
from app.model.fused import gated, norm
from app.model.hidden import HIDDEN
from app.model.kernels.norms import WAYS
from app.model.trainee import Trainee
from tests.model.small import batch_of, documents_of, gradients, lora, packed, trainee_of
from tests.model.test_fp8 import eight

BATCH = batch_of(documents_of((12, 9)))
LAYERS = 2
NAMES = ("quantize_rows", "silu_mul_rounded", "norm_rounded")


def rows_of(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Operations(TorchDispatchMode):
    """How often each operation that rounds was called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._overloadpacket._qualified_op_name.partition("::")
        if space == "app_fp8" and name in NAMES:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Any]) -> tuple[int, ...]:
    with Operations() as operations_:
        call()
    return tuple(operations_.seen[name] for name in NAMES)


@pytest.fixture
def by_itself(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, rows are rounded in a launch of their own."""

    def switch() -> None:
        for module in (norm, gated):
            monkeypatch.setattr(module, "read_rounded", lambda *_: False)

    return switch


def outcome(trainee: Trainee, batch: Batch = BATCH) -> tuple[Tensor, dict[str, Tensor]]:
    trainee.zero_grad()
    loss = trainee(batch)[0]
    loss.backward()
    return loss.detach(), gradients(trainee)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_of_four_launches_a_layer_one_is_left(precision: str, by_itself: Callable[[], None]) -> None:
    """For what attention gives; and gradients come from products, seven of them a layer, but for the first rows'."""
    trainee = eight(precision=precision)
    first = 3  # q, k and v of the first layer: nobody waits for the gradient of embeddings
    back = 7 * LAYERS - first
    assert counted(lambda: outcome(trainee)) == (LAYERS + back, LAYERS, 2 * LAYERS)
    with torch.no_grad():
        assert counted(lambda: trainee.scores(BATCH)) == (LAYERS, LAYERS, 2 * LAYERS)
    by_itself()
    assert counted(lambda: outcome(trainee)) == (4 * LAYERS + back, 0, 0)


def test_where_nobody_would_know_the_rows_again_nothing_is_rounded_on_the_way() -> None:
    trainee = eight()
    with torch.inference_mode():  # such rows do not tell when they are changed
        assert counted(lambda: trainee.scores(BATCH)) == (7 * LAYERS, 0, 0)
    with fp8.rows_as_they_are(trainee.network):
        assert counted(lambda: outcome(trainee)) == (0, 0, 0)
    assert counted(lambda: outcome(trainee_of("llama", lora()))) == (0, 0, 0)


# how many norms of the network give fp8 layers their rows, and layers with a gate of SiLU
KINDS = {
    "llama": (2, 1),
    "qwen3": (2, 1),  # norms of heads give attention theirs
    "gemma2": (2, 0),  # norms behind attention and MLP give the sum theirs, and its gate is a GELU
    "olmo2": (0, 1),  # all norms are behind
    "phi3": (2, 0),  # gate and up are one layer
    "gpt2": (0, 0),  # another norm
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_found_out_whose_rows_are_read(kind: str) -> None:
    trainee = eight(kind)
    assert counted(lambda: outcome(trainee))[1:] == tuple(each * LAYERS for each in KINDS[kind][::-1])
    given = [m.given_by for m in trainee.network.modules() if isinstance(m, Fp8Linear) and m.given_by]
    assert given.count(SwiGlu()) == KINDS[kind][1] * LAYERS
    assert (len(given) > given.count(SwiGlu())) == (KINDS[kind][0] > 0)


@pytest.mark.parametrize(
    ("kind", "precision", "given"),
    [
        ("llama", "fp32", {}),
        ("llama", "bf16", {}),
        ("llama", "bf16", {"recompute": True}),
        ("llama", "fp32", {"adapter": lora(targets=["q_proj", "down_proj"])}),
        ("gemma2", "bf16", {}),
        ("olmo2", "bf16", {}),
    ],
)
def test_training_is_the_same_to_the_bit(
    kind: str, precision: str, given: dict[str, Any], by_itself: Callable[[], None]
) -> None:
    def run() -> tuple[list[float], dict[str, Tensor]]:
        trainee = eight(kind, precision, **given)
        optimizer = torch.optim.AdamW(trainee.trained().values(), lr=1e-2)
        losses = []
        for seed in range(4):
            loss, _ = trainee(packed(documents_of((12, 9, 3), seed)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {name: each.detach() for name, each in trainee.trained().items()}

    with Operations() as seen:
        losses, trained = run()
    assert seen.seen["silu_mul_rounded"] + seen.seen["norm_rounded"] >= 2 * 4
    by_itself()
    plain_losses, plain = run()
    assert losses == plain_losses
    assert len(set(losses)) == 4
    assert all(torch.equal(trained[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [SwiGlu(), *(RootMeanSquare(1e-5, way) for way in range(len(WAYS)))])
def test_what_is_planned_beside_its_rows_is_what_it_takes(form: Form, dtype: torch.dtype) -> None:
    """On a CPU, in which one operation follows the other."""
    one = (
        rows_of(4, 64, 256, dtype=dtype).view(-1, 256)
        if form == SwiGlu()
        else rows_of(4, 64, 256, dtype=dtype)
    )
    other = one.clone() if form == SwiGlu() else one[0, 0]
    name = "silu_mul_rounded" if form == SwiGlu() else "norm_rounded"
    given = (one, other, *((form.eps, form.way) if isinstance(form, RootMeanSquare) else ()))
    inside, outside = StorageCounter("cpu"), StorageCounter("cpu")
    for counter, call in ((inside, lambda: form.plain(one, other)), (outside, lambda: _op(name)(*given))):
        counter.ignore([one, other])
        with counter:
            made = call()
        assert sum(each.nbytes for each in made) <= counter.current
        del made
    assert HIDDEN[f"app_fp8::{name}"](*given) > 0
    assert abs(inside.peak - outside.peak) <= 8192, "but for a number or two of each row and of a weight"


def _op(name: str) -> Any:
    return getattr(torch.ops.app_fp8, name)


def test_without_memory_its_shapes_are_those_of_real_ones() -> None:
    gate, x, weight = rows_of(6, 64), rows_of(2, 3, 64).bfloat16(), rows_of(64).bfloat16()
    for name, given in (("silu_mul_rounded", (gate, gate)), ("norm_rounded", (x, weight, 1e-5, 0))):
        real = _op(name)(*given)
        empty = _op(name)(*(each.to("meta") if isinstance(each, Tensor) else each for each in given))
        for one, other in zip(real, empty, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_which_activation_is_known() -> None:
    from transformers.activations import ACT2FN

    assert all(is_silu(act) for act in (ACT2FN["silu"], ACT2FN["swish"], nn.SiLU(), nn.functional.silu))
    assert not any(is_silu(ACT2FN[name]) for name in ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu"))
