"""Table of optimizers, built for the trained parameters of a model."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from app.config.schema import OptimizerConfig
from app.optim.parameter_groups import Trained, parameter_groups, trained_parameters
from app.optim.stochastic_rounding import OneByOne

OptimizerKind = Callable[[OptimizerConfig, Sequence[Trained]], Optimizer]


def needs_whole_matrices(config: OptimizerConfig) -> bool:
    """Whether updates need whole matrices, so that shards are not enough."""
    return config.kind == "muon"


def build_optimizer(
    config: OptimizerConfig,
    model: nn.Module,
    seed: int = 0,
    shards: Mapping[nn.Parameter, tuple[nn.Parameter, int]] | None = None,
    lr_factor: Callable[[str], float] = lambda _name: 1.0,
) -> Optimizer:
    """Build the optimizer of the model's trained parameters, which must be on their device.

    `shards`: the local part of each sharded parameter and the place of its first number in the whole. Weights in
    bfloat16 are rounded stochastically, by `seed`: plainly rounded, most updates would be lost. `lr_factor`: by name,
    the learning rate of a parameter as a multiple of that of the run.
    """
    trained = trained_parameters(model, lr_factor)
    if shards is not None:
        own = ((each, *shards[each.parameter]) for each in trained if each.parameter in shards)
        trained = [replace(each, parameter=shard, first=first) for each, shard, first in own]
    assert trained, "the model has no trained parameter"
    build = OPTIMIZERS[config.kind]
    if config.in_backward or any(each.parameter.dtype == torch.bfloat16 for each in trained):
        return OneByOne(partial(build, config), trained, seed, in_backward=config.in_backward)
    return build(config, trained)


_HOW: Mapping[str, Any] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}


def _adamw(config: OptimizerConfig, trained: Sequence[Trained]) -> AdamW:
    groups = parameter_groups(trained, config.weight_decay)
    betas, how = (config.beta1, config.beta2), _HOW[config.implementation]
    return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, **how)


def _muon(config: OptimizerConfig, trained: Sequence[Trained]) -> Optimizer:
    """Muon for hidden matrices, AdamW for the rest, with one rate: Muon's update is scaled to AdamW's size."""
    rest = [each for each in trained if not each.is_hidden_matrix]
    matrices = parameter_groups((each for each in trained if each.is_hidden_matrix), config.weight_decay)
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
    """Set momentum buffers to zero: if the first step is skipped, torch's fused SGD leaves them uninitialised."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter in parameters:
        if parameter.grad is not None and "momentum_buffer" not in optimizer.state[parameter]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)


def _adafactor(config: OptimizerConfig, trained: Sequence[Trained]) -> Adafactor:
    """Adafactor on one tensor after another: `foreach` would take twice the states of AdamW in bf16, at the peak."""
    return Adafactor(parameter_groups(trained, config.weight_decay), lr=config.lr, foreach=False)


def _bitsandbytes(class_name: str) -> OptimizerKind:
    def build(config: OptimizerConfig, trained: Sequence[Trained]) -> Optimizer:
        import bitsandbytes.optim as eight_bit

        # `requirements.notes` says it before the run
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        groups = parameter_groups(trained, config.weight_decay)
        eps = {} if class_name == "Lion8bit" else {"eps": config.eps}
        make: Callable[..., Optimizer] = _with_one_wait(getattr(eight_bit, class_name))
        if config.embedding_states == "32bit":
            make = _with_32_bits(make, {each.parameter for each in trained if each.is_embedding})
        return make(groups, lr=config.lr, betas=(config.beta1, config.beta2), **eps)

    return build


def _with_one_wait(kind: Any) -> Any:
    """A class of bitsandbytes whose step has the host wait once, for paged states, and not once for each parameter."""
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
    """A class of bitsandbytes with 32-bit states for the `chosen` parameters.

    Not by its `GlobalOptimManager`: that is one for the whole process, and later models would get such states too.
    """

    class With32Bits(kind):  # type: ignore[misc]
        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            own: dict[str, Any] = super().get_config(gindex, pindex, group)
            return own | ({"optim_bits": 32} if group["params"][pindex] in chosen else {})

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
    """Muon for the matrices and AdamW for the rest, with the groups and states of one optimizer.

    It cannot skip a step on the device: torch's Muon has no such flag.
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
        """Load as torch does, and let both parts share what was loaded."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        # Each part touches the state of its own parameters only, so one dictionary serves both.
        muon, adamw = self.parts
        muon.state = adamw.state = self.state
        muon.param_groups = self.param_groups[: self._num_matrix_groups]
        adamw.param_groups = self.param_groups[self._num_matrix_groups :]
