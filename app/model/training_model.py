"""The trained module: its forward takes a Batch and returns the loss sum and the number of labels."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from app.base.base_model import first_position
from app.batch import Batch, PackedSequences
from app.config.kinds import OWN
from app.config.tasks import Task
from app.config.validate import did_you_mean
from app.errors import ConfigError
from app.layers.activation_checkpointing import repeated_layers
from app.layers.comparison import Comparison
from app.layers.compile import CompiledLayers
from app.layers.experts import RouterLoss
from app.layers.head import (
    Head,
    LinearHead,
    chunk_rows,
    head_parameters,
    own_head,
    pooled_head,
    takes_segments,
    token_loss_sum,
    token_scores,
)
from app.layers.quantization import Quantizer
from app.layers.recurrent import pad_mixers
from app.model.losses import Loss

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


def gathers(method: Method) -> Method:
    """Mark a method that starts a pass like forward: FSDP gathers the root's weights before it."""
    vars(method)["gathers"] = True
    return method


class TrainingModel(nn.Module):
    """A language model with its loss.

    `network` is the model or its PEFT wrapper; `attention` is the name of its backend. Settings that depend on its
    weights are made later, by `divide`, the `use_` methods and `add_remark`.
    """

    def __init__(
        self,
        network: nn.Module,
        compute: torch.dtype | None,
        task: Task,
        loss: Loss,
        attention: str = "sdpa",
        quantizer: Quantizer | None = None,
        compiled_layers: CompiledLayers | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.compute = compute
        self.attention = attention
        self.quantizer = quantizer  # of the base
        self.compiled_layers = compiled_layers
        self.grouped_experts: list[Comparison] = []  # passed comparisons of the grouped function
        self.sharding: Any = None  # app.distributed.fsdp.Sharding, if the model is sharded
        self.pooled, self.has_classes = task.pooled, task.has_classes
        self.loss = loss
        lm = self.language_model
        self.linear: LinearHead | None = None
        self.router_loss: RouterLoss | None = None  # for experts with a coefficient above 0
        self.head: Head = pooled_head(lm) if self.pooled else own_head(lm)
        self.takes_segments = takes_segments(lm)
        self._trained: dict[str, nn.Parameter] = {}
        self._remarks: list[str] = []
        self.first_position = first_position(lm)
        pad_mixers(lm)
        self.chunk = chunk_rows(lm.config.get_text_config().vocab_size)
        self._lengths: tuple[int, ...] = ()  # of the documents in the current pass

    @property
    def language_model(self) -> Any:
        """The transformers model, with or without adapters inside."""
        unwrap = getattr(self.network, "get_base_model", None)
        return self.network if unwrap is None else unwrap()

    def forward(self, batch: Batch) -> tuple[Tensor, int]:
        """Return the weighted loss sum over all labels, or the loss sum over all data rows, and the number of labels.

        The sum includes the router loss, whose value `router_loss` keeps.
        """
        with self.autocast(batch.ids.device):
            if self.router_loss is None:
                return self.loss.of_states(self, self._labeled_rows(batch), batch), batch.num_labels
            with self.router_loss.reading():
                rows = self._labeled_rows(batch)
                balance = self.router_loss.of(batch)
            loss = self.loss.of_states(self, rows, batch) + self.router_loss.coefficient * balance
            return loss, batch.num_labels

    @gathers
    @torch.no_grad()
    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss of each target and the most likely token or class."""
        with self.autocast(batch.ids.device):
            rows = self._labeled_rows(batch)
            return self.loss.scores(self, rows, batch)

    def class_logits(self, rows: Tensor) -> Tensor:
        """Return fp32 logits of a classification head, from hidden states."""
        logits: Tensor = self.head(rows).float()
        return logits

    def token_loss_sum(self, rows: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Return the weighted sum of cross-entropies over all targets, from hidden states."""
        if self.linear is not None:
            return self.linear.loss_sum(rows, targets, weights)
        trained = head_parameters(self.language_model)
        return token_loss_sum(self.head, rows, targets, trained, self.chunk, weights)

    def token_scores(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of each target and the most likely token, from hidden states."""
        if self.linear is not None:
            return self.linear.scores(rows, targets)
        return token_scores(self.head, rows, targets, head_parameters(self.language_model), self.chunk)

    def remarks(self) -> list[str]:
        """Return notes on slow fallbacks, and on computation other than the model's own code."""
        return [*self._remarks, *(self.compiled_layers.remarks() if self.compiled_layers else [])]

    def add_remark(self, text: str) -> None:
        self._remarks.append(text)

    def use_neftune(self, alpha: float) -> None:
        self.language_model.get_input_embeddings().register_forward_hook(partial(self._with_noise, alpha))

    def _with_noise(self, alpha: float, _module: nn.Module, _arguments: Any, embeddings: Tensor) -> Tensor:
        """Return embeddings with uniform noise, weaker for longer documents."""
        if not self.training:
            return embeddings
        lines, width, size = embeddings.shape
        tokens = [length for length in self._lengths for _ in range(length if lines == 1 else width)]
        lengths = _on(embeddings.device, tokens + [width] * (lines * width - len(tokens)))
        scale = (alpha / (lengths * size).sqrt()).to(embeddings.dtype).view(lines, width, 1)
        return embeddings + torch.empty_like(embeddings).uniform_(-1, 1) * scale

    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the backbone's output [R, S, hidden]."""
        self._lengths = batch.lengths
        states: Tensor = self.language_model.base_model(
            input_ids=batch.ids,
            use_cache=False,
            **self.places(batch.positions, batch.documents, batch.lengths),
            **self.segment_arguments(batch.token_type_ids),
        )[0]
        return states

    def _labeled_rows(self, batch: Batch) -> Tensor:
        return self.hidden_states(batch).flatten(0, 1).index_select(0, batch.label_rows)

    def places(
        self, positions: Tensor, documents: PackedSequences | None, lengths: Sequence[int] | None
    ) -> dict[str, Any]:
        """Return backbone arguments with the positions of documents; a model's own attention counts from each row's
        start and gets a mask if tokens would see padding.
        """
        if self.attention != OWN:
            return {"position_ids": positions + self.first_position, "documents": documents}
        if documents is None or lengths is None:
            return {}
        ends = _on(positions.device, lengths)[:, None]
        return {"attention_mask": (torch.arange(positions.shape[1], device=positions.device) < ends).long()}

    def segment_arguments(self, segments: Tensor | None) -> dict[str, Tensor]:
        return {} if segments is None or not self.takes_segments else {"token_type_ids": segments}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in the network, tied ones once."""
        return self._trained or {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def divide(self, sharding: Any, fill: Callable[[], None] = lambda: None) -> None:
        """Shard the parameters, fill them, and store the sharded ones: after a pass modules have gathered ones."""
        passes = [name for name, method in vars(TrainingModel).items() if hasattr(method, "gathers")]
        sharding.divide(self, repeated_layers(self.network), passes)
        fill()
        self.sharding, self._trained = sharding, self.trained()

    def use_linear_head(self, head: LinearHead | None) -> None:
        self.linear = head

    def use_router_loss(self, router_loss: RouterLoss) -> None:
        self.router_loss = router_loss

    def use_grouped_experts(self, passed: list[Comparison]) -> None:
        self.grouped_experts = passed

    @gathers
    def within(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which calls submodules directly: a forward hook of FSDP gathers parameters outside layers."""
        return work()

    @contextlib.contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        """Context with autocast in the run's precision: Accelerate's autocast silently ignores fp16 on CPU."""
        if self.compute is None:
            yield
        else:
            # cached casts would outlive their layer, with a copy of all trained weights until the forward pass ends
            with torch.autocast(device.type, dtype=self.compute, cache_enabled=False):
                yield

    @gathers
    @torch.no_grad()
    def logits(self, ids: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the model's own logits for one document."""
        lm = self.language_model
        arguments = {name: tensor[None].to(lm.device) for name, tensor in self.segment_arguments(segments).items()}
        logits: Tensor = lm(input_ids=ids[None].to(lm.device), use_cache=False, **arguments).logits
        return logits[0]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context without dropout."""
    mode = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(mode)


def freeze(network: nn.Module, patterns: Collection[str]) -> None:
    """Freeze weights by name: a pattern matches between two dots; `*` and `?` are wildcards."""
    matched: set[str] = set()
    for name, parameter in network.named_parameters():
        matches = {pattern for pattern in patterns if fnmatchcase(f".{name}.", f"*.{pattern}.*")}
        parameter.requires_grad_(parameter.requires_grad and not matches)
        matched |= matches
    for pattern in sorted(set(patterns) - matched):
        parts = sorted({part for name, _ in network.named_parameters() for part in name.split(".")})
        raise ConfigError(
            f"training.freeze: {pattern} is not part of any weight name in this model.{did_you_mean(pattern, parts)} "
            f"Example of a name: {next(network.named_parameters())[0]}."
        )
    if patterns and not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(f"training.freeze=[{','.join(patterns)}] leaves nothing to train. Remove some of it.")


def _on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Copy host numbers to the device without synchronizing."""
    return torch.tensor(numbers).to(device, non_blocking=True)
