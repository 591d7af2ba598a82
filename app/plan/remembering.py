"""Tensors without memory whose operations are worked out once.

What comes out of an operation follows from the sizes, strides and types of what goes in, and the layers of a network
ask the same again and again. torch remembers answers too, but to ask it costs more than the rest of a trace.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class _Fakes:
    """Makes the fake tensors of one mode. Its constructor takes a sixth of a trace to set what all of them share."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._common: dict[torch.device, dict[str, Any]] = {}
        core = torch._C
        warns = mode._allow_unsafe_data_ptr_access
        self._guard = (
            core._set_warn_deprecated_on_mutable_data_ptr if warns else core._set_throw_on_mutable_data_ptr
        )

    def fake(self, inner: Tensor, device: torch.device) -> Tensor:
        """As FakeTensor(mode, inner, device)."""
        common = self._common.get(device)
        if common is None:
            first = FakeTensor(self._mode, inner, device)
            self._common[device] = dict(vars(first))
            return first
        made: Tensor = Tensor._make_subclass(
            FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(made)
        vars(made).update(common)
        return made


class _Answer(Protocol):
    """What an operation returns."""

    def made(self, fakes: _Fakes, given: Sequence[Tensor]) -> Any:
        """For these tensors."""


_ANSWERS: dict[tuple[Any, ...], _Answer] = {}  # of this process


class Remembering:
    """Calls operations on the fake tensors of one mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._fakes = _Fakes(mode)
        mode.cache_enabled = False  # torch's own

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As torch calls it."""
        given: list[Tensor] = []
        try:
            question = (
                func,
                torch.get_default_dtype(),
                *_parts(args, given),
                *kwargs,
                *_parts(kwargs.values(), given),
            )
            answer = _ANSWERS.get(question)
        except TypeError:  # something else than numbers, names and tensors of ours
            return func(*args, **kwargs)
        if answer is not None:
            with torch._C._DisableTorchDispatch():
                return answer.made(self._fakes, given)
        out = func(*args, **kwargs)
        if _depends_on_forms(func):
            with torch._C._DisableTorchDispatch():
                answer = _answer(self._fakes, out, given)
        if answer is not None:
            _ANSWERS[question] = answer
        return out


def _parts(values: Iterable[Any], given: list[Tensor]) -> tuple[Any, ...]:
    """What is asked; its tensors are appended to `given`. 1, 1.0 and True are different questions."""
    parts: list[Any] = []
    for each in values:
        if isinstance(each, Tensor):
            parts.append(_form_of(each))
            given.append(each)
        elif isinstance(each, list | tuple):
            parts.append((len(each), *_parts(each, given)))
        else:
            parts.append((type(each), each))
    return tuple(parts)


def _form_of(tensor: Any) -> tuple[Any, ...]:
    if not _is_plain(tensor):
        raise TypeError(f"{type(tensor)} is not remembered")
    keys = torch._C._dispatch_keys(tensor).raw_repr()  # device, layout, and what is put off till it is read
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.fake_device, keys


def _is_plain(tensor: Any) -> bool:
    """Of fake ones those that hold no number."""
    return type(tensor) is FakeTensor and tensor.constant is None


def _depends_on_forms(func: Any) -> bool:
    """Not what gives a tensor another form in place, as some operations of others may."""
    if not isinstance(func, OpOverload) or torch.Tag.inplace_view in func.tags:
        return False
    return func.namespace == "aten" or not func._schema.is_mutable


def _answer(fakes: _Fakes, out: Any, given: Sequence[Tensor]) -> _Answer | None:
    """None where it cannot be told from this one."""
    if not isinstance(out, list | tuple):
        return _of_one(fakes, out, given)
    answers = [_of_one(fakes, each, given) for each in out]
    own = [
        _place(each)
        for each, how in zip(out, answers, strict=True)
        if isinstance(how, _Tensor) and how.base is None
    ]
    known = [each for each in answers if each is not None]
    whole = len(known) == len(answers) and len(set(own)) == len(own)
    return _Several(list if isinstance(out, list) else tuple, tuple(known)) if whole else None


def _of_one(fakes: _Fakes, out: Any, given: Sequence[Tensor]) -> _Answer | None:
    if out is None:
        return _Nothing()
    same = [at for at, each in enumerate(given) if each is out]
    if same:
        return _Given(same[0])
    if not _is_plain(out) or out.requires_grad:
        return None
    place = _place(out)
    bases = [at for at, each in enumerate(given) if _place(each) == place]
    if len({id(given[at]) for at in bases}) > 1:
        return None  # it is a part of one of them
    base = bases[0] if bases else None
    answer = _Tensor(base, out.size(), out.stride(), out.storage_offset(), out.dtype, out.fake_device)
    again = answer.made(fakes, given)
    alike = _form_of(again) == _form_of(out) and _bytes(again) == _bytes(out)
    return answer if alike else None


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True)
class _Nothing:
    def made(self, _fakes: _Fakes, _given: Sequence[Tensor]) -> None:
        """As the operation."""


@dataclass(frozen=True, slots=True)
class _Given:
    """One of what was given."""

    at: int

    def made(self, _fakes: _Fakes, given: Sequence[Tensor]) -> Tensor:
        """It."""
        return given[self.at]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A new one, or a view of one that was given."""

    base: int | None
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def made(self, fakes: _Fakes, given: Sequence[Tensor]) -> Tensor:
        """With a storage of its own, or that one's."""
        if self.base is None:
            inner = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        else:
            storage: Any = given[self.base].untyped_storage()
            inner = torch.empty(0, dtype=self.dtype, device="meta")
            inner.set_(storage, self.offset, self.size, self.stride)
        return fakes.fake(inner, self.device)


@dataclass(frozen=True, slots=True)
class _Several:
    kind: type[list[Any]] | type[tuple[Any, ...]]
    each: tuple[_Answer, ...]

    def made(self, fakes: _Fakes, given: Sequence[Tensor]) -> Any:
        """All of them."""
        return self.kind(one.made(fakes, given) for one in self.each)
