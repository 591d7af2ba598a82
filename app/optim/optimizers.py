"""Optimizers: the table, parameter groups, fp16 loss scale, skipped steps, stochastic rounding of bfloat16 weights.

To skip a step on the device, torch's fused optimizers read a flag in device memory within the kernel: their contract
with torch's gradient scaler. Only `step_unless` relies on it.

With bfloat16 weights an optimizer steps one parameter at a time, on float32 stand-ins that have a shape but no memory
between steps. So its states are in float32 and are saved and loaded as usual.

bfloat16 is the upper half of a float32. Random bits are added to the lower half before truncation: the closer a number
is to the next one above, the more often the sum carries, so small updates are not lost on average. The bits depend on
positions in the whole tensor, so a shard is rounded like the whole.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from app.config.schema import OptimizerConfig


def squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares in float64, so that it does not depend on the sharding of gradients."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(list(gradients), 2.0, dtype=torch.float64)
    total: Tensor = torch.stack(list(norms)).square().sum()
    return total


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether `step_unless` works; else the caller must read the flag and skip the step."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_unless(optimizer: Optimizer, found_inf: Tensor) -> None:
    """Step; change neither parameters nor states if `found_inf`, a float32 scalar, is 1 and not 0."""
    assert skips_on_device(optimizer)
    assert found_inf.ndim == 0, "the step counters are scalars and subtract the flag in place"
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


START, GROWTH_INTERVAL = 65536.0, 2000  # initial scale; finite steps before it doubles


class LossScale:
    """Loss scale of fp16: halved after a non-finite step, doubled after many finite steps.

    Like torch's GradScaler, but based on the gradient norm, which is equal on all ranks.
    """

    def __init__(self, device: torch.device, value: float = START) -> None:
        self.value = torch.tensor(value, device=device)
        self._finite_steps = torch.zeros((), dtype=torch.int32, device=device)  # since the last change

    def update(self, finite: Tensor) -> None:
        found_inf = (~finite).float().to(self.value.device)
        torch._amp_update_scale_(self.value, self._finite_steps, found_inf, 2.0, 0.5, GROWTH_INTERVAL)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with the names of torch's GradScaler."""
        return {"scale": float(self.value), "_growth_tracker": int(self._finite_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.fill_(float(state["scale"]))
        self._finite_steps.fill_(int(state["_growth_tracker"]))


# ---- parameter groups


LR_FACTOR = "lr_factor"  # key of a parameter group


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained parameter and its role in the model."""

    name: str
    parameter: nn.Parameter
    decays: bool
    is_hidden_matrix: bool  # 2-D, and neither an embedding nor the output head
    is_embedding: bool  # or a head tied to it
    place: int = 0  # index among all trained tensors of the model
    first: int = 0  # for a shard: index of its first element in the whole tensor
    lr_factor: float = 1.0  # learning rate as a multiple of `optimizer.lr`


def trained_parameters(model: nn.Module, lr_factor: Callable[[str], float] = lambda _name: 1.0) -> list[Trained]:
    """Return the parameters with `requires_grad`, once each, in the order of `model.named_parameters()`."""
    embeddings = _ids(module for module in model.modules() if isinstance(module, nn.Embedding))
    ends = embeddings | _ids(_output_heads(model))
    norms = _ids(module for module in model.modules() if "norm" in type(module).__name__.lower())
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return [
        Trained(
            name=name,
            parameter=parameter,
            # experts have their biases in one matrix, so the number of dimensions is not enough
            decays=parameter.ndim >= 2 and id(parameter) not in embeddings | norms and not name.endswith("bias"),
            is_hidden_matrix=parameter.ndim == 2 and id(parameter) not in ends,
            is_embedding=id(parameter) in embeddings,
            place=place,
            lr_factor=lr_factor(name),
        )
        for place, (name, parameter) in enumerate(trained)
    ]


def parameter_groups(members: Iterable[Trained], weight_decay: float) -> list[dict[str, Any]]:
    """Return non-empty torch parameter groups by learning rate, with and without weight decay, with names.

    Groups with the learning rate `optimizer.lr` are first and have no factor.
    """
    members = list(members)
    factors = sorted({m.lr_factor for m in members}, key=lambda factor: (factor != 1, factor))
    return [
        {"params": group, "weight_decay": decay} | ({} if factor == 1 else {LR_FACTOR: factor})
        for factor in factors
        for decays, decay in ((True, weight_decay), (False, 0.0))
        if (group := [(m.name, m.parameter) for m in members if m.decays is decays and m.lr_factor == factor])
    ]


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def _output_heads(model: nn.Module) -> Iterable[nn.Module]:
    """Yield the modules of the output heads; both the model and the head may be wrapped."""
    for module in model.modules():
        ask: Callable[[], nn.Module | None] | None = getattr(module, "get_output_embeddings", None)
        head = ask() if callable(ask) else None
        if head is not None:
            yield from head.modules()


# ---- stochastic rounding


_HALF_BITS = 16
PIECE_NUMBERS = 1 << 24  # elements rounded at once, with a separate generator: random bits need memory
_NAN_BITS = 0x7FC00000  # set for every NaN: the sum, or truncating the lower half, could turn a NaN into a number
STEPS_ROUNDED = "steps_rounded"  # key in the first group, so that it is in the state_dict


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a parameter in the inner optimizer."""

    exact: nn.Parameter  # the stand-in, or the parameter itself if it is already float32
    part: Optimizer
    group: int
    name: str


class OneByOne(Optimizer):
    """Optimizer that steps one parameter at a time, with the groups and states of the inner optimizer."""

    def __init__(
        self,
        build: Callable[[Sequence[Trained]], Optimizer],
        trained: Sequence[Trained],
        seed: int,
        *,
        in_backward: bool,
    ) -> None:
        number = torch.zeros((), device=trained[0].parameter.device)
        exact = [
            replace(member, parameter=nn.Parameter(number.expand(member.parameter.shape)))
            if member.parameter.dtype == torch.bfloat16
            else member
            for member in trained
        ]
        self.inner = build(exact)
        self.in_backward = in_backward  # whether `step_one` is called during the backward pass
        self._seed = seed
        super().__init__(self.inner.param_groups, {})
        self._rounds = any(member.parameter.dtype == torch.bfloat16 for member in trained)
        if self._rounds:
            self.inner.param_groups[0][STEPS_ROUNDED] = 0
        self._share()
        real = {member.name: member.parameter for member in trained}
        self._places = {real[place.name]: place for place in _places(self.inner)}
        self._trained = {member.parameter: member for member in trained}

    @property
    def stepped(self) -> list[nn.Parameter]:
        """Parameters of the model, for which the inner optimizer has stand-ins."""
        return list(self._places)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step can be skipped on the device, as read by `skips_on_device`."""
        return skips_on_device(self.inner)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters that still have a gradient, and count the step."""
        assert closure is None
        found_inf = getattr(self, "found_inf", None)
        for parameter in self._places:
            if parameter.grad is not None:
                self.step_one(parameter, found_inf)
        if self._rounds:
            self.param_groups[0][STEPS_ROUNDED] += 1
        return None

    @torch.no_grad()
    def step_one(self, parameter: nn.Parameter, found_inf: Tensor | None = None) -> None:
        """Step one parameter, unless `found_inf` is 1, which needs an optimizer that skips on the device."""
        place = self._places[parameter]
        if place.exact is parameter:
            self._step_at(place, found_inf)
            return
        assert parameter.grad is not None
        nothing = place.exact.data
        try:
            place.exact.data = parameter.detach().float()
            place.exact.grad = parameter.grad.float()
            if self.in_backward:
                parameter.grad = None  # no longer needed
            self._step_at(place, found_inf)
            place.exact.grad = None
            step, trained = self.param_groups[0][STEPS_ROUNDED], self._trained[parameter]
            round_into(parameter, place.exact, f"{self._seed}/{step}/{trained.place}", trained.first)
        finally:
            place.exact.grad, place.exact.data = None, nothing

    def _step_at(self, place: _Place, found_inf: Tensor | None) -> None:
        """Step with a group of this parameter only: the inner optimizer would visit all parameters every time."""
        part, group = place.part, self.param_groups[place.group]
        groups = part.param_groups
        part.param_groups = [{**group, "params": [place.exact], "param_names": [place.name]}]
        try:
            if found_inf is None:
                part.step()
            else:
                step_unless(part, found_inf)
        finally:
            part.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        for parameter in self._places:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], **how: Any) -> None:
        self.inner.load_state_dict(state_dict, **how)
        self._share()

    def _share(self) -> None:
        self.state, self.param_groups = self.inner.state, self.inner.param_groups


def ordinary(optimizer: Optimizer) -> Optimizer:
    """Return the torch or bitsandbytes optimizer: the inner optimizer of a OneByOne, or the argument."""
    return optimizer.inner if isinstance(optimizer, OneByOne) else optimizer


def stepped_by(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the model parameters that an optimizer steps."""
    if isinstance(optimizer, OneByOne):
        return optimizer.stepped
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def steps_in_backward(optimizer: Optimizer) -> TypeGuard[OneByOne]:
    """Return whether weights are stepped during the backward pass."""
    return isinstance(optimizer, OneByOne) and optimizer.in_backward


def _places(optimizer: Optimizer) -> list[_Place]:
    parts: Sequence[Optimizer] = getattr(optimizer, "parts", (optimizer,))
    owners = {id(group): part for part in parts for group in part.param_groups}
    return [
        _Place(exact, owners[id(group)], at, name)
        for at, group in enumerate(optimizer.param_groups)
        for exact, name in zip(group["params"], group["param_names"], strict=True)
    ]


@torch.no_grad()
def round_into(weight: Tensor, exact: Tensor, key: str, first: int = 0) -> None:
    """Round `exact` (float32) stochastically into `weight` (bfloat16), so that the expected value is `exact`.

    `key` seeds the random bits; `first` is the index of the first element in the whole tensor. bfloat16 values,
    infinities and NaN do not change. Works on bits, so that subnormal numbers are not flushed to zero.
    """
    assert weight.dtype == torch.bfloat16
    assert exact.dtype == torch.float32
    source = exact.reshape(-1).view(torch.int32)
    target = weight if weight.is_contiguous() else weight.contiguous()
    upper = target.view(-1).view(torch.int16)
    end = first + source.numel()
    for piece in range(first - first % PIECE_NUMBERS, end, PIECE_NUMBERS):
        low, high = max(piece, first), min(piece + PIECE_NUMBERS, end)
        bits = source[low - first : high - first]
        chance = _random_bits(f"{key}/{piece}", high - piece, exact.device)[low - piece :]
        chance.add_(bits).masked_fill_(bits.view(torch.float32).isnan(), _NAN_BITS)
        upper[low - first : high - first].copy_(chance.bitwise_right_shift_(_HALF_BITS))
    if target is not weight:
        weight.copy_(target)


def _random_bits(key: str, count: int, device: torch.device) -> Tensor:
    """Return the first `count` random numbers of a piece."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    # on a GPU the first numbers depend on the count
    drawn = PIECE_NUMBERS if device.type == "cuda" else count
    numbers = torch.empty(drawn, dtype=torch.int32, device=device)
    return numbers.random_(0, 1 << _HALF_BITS, generator=generator)[:count]


# ---- optimizers


OptimizerKind = Callable[[OptimizerConfig, Sequence[Trained]], Optimizer]


def needs_whole_matrices(config: OptimizerConfig) -> bool:
    """Return whether updates need whole matrices rather than shards."""
    return config.kind == "muon"


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    seed: int = 0,
    shards: Mapping[nn.Parameter, tuple[nn.Parameter, int]] | None = None,
    lr_factor: Callable[[str], float] = lambda _name: 1.0,
) -> Optimizer:
    """Build the optimizer of the model's trained parameters, which must be on their device.

    `shards`: the local part of each sharded parameter and the index of its first element in the whole. bfloat16
    weights are rounded stochastically with `seed`: with plain rounding most updates would be lost. `lr_factor`: the
    learning rate by parameter name, as a multiple of `optimizer.lr`.
    """
    trained = trained_parameters(model, lr_factor)
    if shards is not None:
        local = ((member, *shards[member.parameter]) for member in trained if member.parameter in shards)
        trained = [replace(member, parameter=shard, first=first) for member, shard, first in local]
    assert trained, "the model has no trained parameter"
    build = OPTIMIZERS[config.kind]
    if config.in_backward or any(member.parameter.dtype == torch.bfloat16 for member in trained):
        return OneByOne(partial(build, config), trained, seed, in_backward=config.in_backward)
    return build(config, trained)


_HOW: Mapping[str, Any] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


def _adamw(config: OptimizerConfig, trained: Sequence[Trained]) -> AdamW:
    groups = parameter_groups(trained, config.weight_decay)
    betas, how = (config.beta1, config.beta2), _HOW[config.implementation]
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, **how)


def _muon(config: OptimizerConfig, trained: Sequence[Trained]) -> Optimizer:
    """Build Muon for hidden matrices and AdamW for the rest, with one learning rate: Muon's updates are scaled to
    AdamW's size.
    """
    rest = [member for member in trained if not member.is_hidden_matrix]
    matrices = parameter_groups((member for member in trained if member.is_hidden_matrix), config.weight_decay)
    if not matrices:
        return _adamw(config, rest)
    muon = Muon(matrices, lr=config.lr, momentum=config.momentum, adjust_lr_fn="match_rms_adamw")
    return MuonWithAdamW(muon, _adamw(config, rest)) if rest else muon


def _sgd(config: OptimizerConfig, trained: Sequence[Trained]) -> SGD:
    groups = parameter_groups(trained, config.weight_decay)
    optimizer = SGD(groups, lr=config.lr, momentum=config.momentum, **_HOW[config.implementation])
    if config.momentum > 0:
        optimizer.register_step_pre_hook(_start_momentum_at_zero)
    return optimizer


def _start_momentum_at_zero(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Zero the momentum buffers: if the first step is skipped, torch's fused SGD leaves them uninitialized."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter in parameters:
        if parameter.grad is not None and "momentum_buffer" not in optimizer.state[parameter]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def _adafactor(config: OptimizerConfig, trained: Sequence[Trained]) -> Adafactor:
    """Build Adafactor for one tensor at a time: at its peak `foreach` takes twice the bf16 states of AdamW."""
    return Adafactor(parameter_groups(trained, config.weight_decay), lr=config.lr, foreach=False)


def _bitsandbytes(class_name: str) -> OptimizerKind:
    def build(config: OptimizerConfig, trained: Sequence[Trained]) -> Optimizer:
        import bitsandbytes.optim as eight_bit

        # reported by `requirements.notes` before the run
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        groups = parameter_groups(trained, config.weight_decay)
        eps = {} if class_name == "Lion8bit" else {"eps": config.eps}
        make: Callable[..., Optimizer] = _with_one_wait(getattr(eight_bit, class_name))
        if config.embedding_states == "32bit":
            make = _with_32_bits(make, {member.parameter for member in trained if member.is_embedding})
        return make(groups, lr=config.lr, betas=(config.beta1, config.beta2), **eps)

    return build


def _with_one_wait(kind: Any) -> Any:
    """Return a bitsandbytes class that synchronizes with paged states once per step, not once per parameter."""
    from bitsandbytes.utils import sync_gpu

    class WithOneWait(kind):  # type: ignore[misc]
        initialized: bool

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> None:
            assert closure is None
            if not self.initialized:
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            stepped = None
            for at, group in enumerate(self.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, at, place)
                    self.prefetch_state(parameter)
                    self.update_step(group, parameter, at, place)
                    stepped = parameter
            if self.is_paged and stepped is not None:
                sync_gpu(stepped)

    return WithOneWait


def _with_32_bits(kind: Any, chosen: set[nn.Parameter]) -> Callable[..., Optimizer]:
    """Return a bitsandbytes class with 32-bit states for the `chosen` parameters.

    `GlobalOptimManager` is not used: it is global to the process and would affect later models.
    """

    class With32Bits(kind):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            options: dict[str, Any] = super().get_config(gindex, pindex, group)
            return options | ({"optim_bits": 32} if group["params"][pindex] in chosen else {})

    return With32Bits


def _apex(config: OptimizerConfig, trained: Sequence[Trained]) -> Optimizer:
    from apex.optimizers import FusedAdam

    groups = parameter_groups(trained, config.weight_decay)
    make: Callable[..., Optimizer] = FusedAdam
    return make(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, adam_w_mode=True)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": _adamw,
    "muon": _muon,
    "sgd": _sgd,
    "adafactor": _adafactor,
    "adamw_apex": _apex,
    "adamw_bnb_32bit": _bitsandbytes("AdamW32bit"),
    "adamw_8bit": _bitsandbytes("AdamW8bit"),
    "paged_adamw_8bit": _bitsandbytes("PagedAdamW8bit"),
    "paged_adamw_32bit": _bitsandbytes("PagedAdamW32bit"),
    "lion_8bit": _bitsandbytes("Lion8bit"),
}


class MuonWithAdamW(Optimizer):
    """Muon for matrices and AdamW for the rest, with the groups and states of one optimizer.

    Steps cannot be skipped on the device: torch's Muon has no such flag.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self.parts: tuple[Optimizer, Optimizer] = (muon, adamw)
        self._num_matrix_groups = len(muon.param_groups)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, and share the loaded state with both parts."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        # each part uses the state of its parameters only, so both can share one dictionary
        muon, adamw = self.parts
        muon.state = adamw.state = self.state
        muon.param_groups = self.param_groups[: self._num_matrix_groups]
        adamw.param_groups = self.param_groups[self._num_matrix_groups :]
