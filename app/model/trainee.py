"""What the engine trains: a module whose forward takes a Batch and returns its loss sum and label count."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from app.batch import Batch
from app.errors import EnvironmentProblem
from app.model.chunked_loss import LinearHead, chunk_rows, token_loss_sum, token_scores
from app.model.compiling import Blocks
from app.model.fusion import Fused
from app.model.head import Head, head_parameters, own_head
from app.model.pooled import class_loss_sum, class_scores, pooled_head, takes_segments
from app.model.positions import first_position
from app.model.proof import Proof

Found = TypeVar("Found")

_HEAD_TOLERANCE = 1e-5  # of the largest logit, in float32


class Trainee(nn.Module):
    """A language model with its loss. `network` is the model, or PEFT's wrapper round it."""

    def __init__(self, network: nn.Module, compute: torch.dtype | None, *, pooled: bool = False) -> None:
        super().__init__()
        self.network = network
        self.compute = compute
        self.fused = Fused()
        self.blocks: Blocks | None = None  # layers that are compiled
        self.sharding: Any = None  # where several processes divide the model: app.distributed.fsdp.Sharding
        self.pooled = pooled  # one answer for a document
        lm = self.language_model
        self.linear: LinearHead | None = None  # a faster way, where it is proven: model.chunked_loss
        self.head_remarks: tuple[str, ...] = ()
        self.head: Head = pooled_head(lm) if pooled else own_head(lm)
        self.takes_segments = takes_segments(lm)
        self._trained: dict[str, nn.Parameter] = {}
        self.first_position = first_position(lm)
        self._chunk = chunk_rows(lm.config.get_text_config().vocab_size)

    @property
    def language_model(self) -> Any:
        """The transformers model, adapters inside it or not."""
        unwrap = getattr(self.network, "get_base_model", None)
        return self.network if unwrap is None else unwrap()

    def forward(self, batch: Batch) -> tuple[Tensor, int]:
        """The sum of the losses of all labelled tokens or documents, each times its weight, and how many they are."""
        with self.arithmetic(batch.ids.device):
            rows = self._labelled_rows(batch)
            if self.pooled:
                return class_loss_sum(self.head, rows, batch.targets), batch.num_labels
            weights = None if batch.weights is None else batch.weights.per_target
            if self.linear is not None:
                return self.linear.loss_sum(rows, batch.targets, weights), batch.num_labels
            trained = head_parameters(self.language_model)
            loss = token_loss_sum(self.head, rows, batch.targets, trained, self._chunk, weights)
        return loss, batch.num_labels

    @torch.no_grad()
    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of each target of the batch its loss, and what the model would have chosen."""
        with self.arithmetic(batch.ids.device):
            rows = self._labelled_rows(batch)
            if self.pooled:
                return class_scores(self.head, rows, batch.targets)
            if self.linear is not None:
                return self.linear.scores(rows, batch.targets)
            trained = head_parameters(self.language_model)
            return token_scores(self.head, rows, batch.targets, trained, self._chunk)

    def remarks(self) -> list[str]:
        """On what is computed in a slower way than it could be, or by other code than the model's own."""
        compiled = self.blocks.remarks() if self.blocks else []
        return [*self.fused.remarks(), *self.head_remarks, *compiled]

    def _labelled_rows(self, batch: Batch) -> Tensor:
        hidden = self.language_model.base_model(
            input_ids=batch.ids,
            position_ids=batch.positions + self.first_position,
            use_cache=False,
            documents=batch.documents,
            **self._sides(batch.token_type_ids),
        )[0]
        rows: Tensor = hidden.flatten(0, 1).index_select(0, batch.label_rows)
        return rows

    def _sides(self, segments: Tensor | None) -> dict[str, Tensor]:
        """For a backbone that is told of them."""
        return {} if segments is None or not self.takes_segments else {"token_type_ids": segments}

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that change, by their name in the network; tied ones once."""
        return self._trained or self._trained_now()

    def _trained_now(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def divided_by(self, sharding: Any) -> None:
        """Parameters are DTensors from here on. They are noted, because modules show gathered ones after a pass."""
        self.sharding = sharding
        self._trained = self._trained_now()

    def within(self, work: Callable[[], Found]) -> Found:
        """`work` that begins passes elsewhere than here: where the model is divided, what layers share is gathered."""
        return work()

    def gathered(self, state: Mapping[str, Tensor], *, keeps: bool) -> dict[str, Tensor] | None:
        """Where the model is divided, whole tensors for the process that `keeps` them; None: they are whole already."""
        if self.sharding is None:
            return None
        found: dict[str, Tensor] = self.sharding.state_on_host(state, keeps=keeps)
        return found

    @contextlib.contextmanager
    def arithmetic(self, device: torch.device) -> Iterator[None]:
        """Autocast of the run's precision. Our own: Accelerate's does nothing for fp16 on a CPU, silently."""
        if self.compute is None:
            yield
        else:
            # what autocast remembers of a weight would outlive the layer that gathered it
            remembers = self.sharding is None
            with torch.autocast(device.type, dtype=self.compute, cache_enabled=remembers):
                yield

    @torch.no_grad()
    def predicted(self, ids: Tensor) -> Tensor:
        """The likeliest token at each position of one document."""
        lm = self.language_model
        logits: Tensor = lm(input_ids=ids[None].to(lm.device), use_cache=False).logits
        return logits[0].argmax(-1).cpu()

    @torch.no_grad()
    def likelihoods(self, ids: Tensor, segments: Tensor | None) -> Tensor:
        """Of one document the probability of each class."""
        lm = self.language_model
        given = {name: each[None].to(lm.device) for name, each in self._sides(segments).items()}
        logits: Tensor = lm(input_ids=ids[None].to(lm.device), use_cache=False, **given).logits
        return logits[0].float().softmax(-1).cpu()

    @torch.no_grad()
    def check_head(self, batch: Batch) -> Proof:
        """Refuse a kind whose logits are not its head applied to its backbone's output."""
        lm = self.language_model
        mode = self.training
        self.eval()
        with self.arithmetic(batch.ids.device) if self.pooled else contextlib.nullcontext():
            own, ours = self._pooled_logits(batch) if self.pooled else self._first_logits(batch)
        self.train(mode)
        error = float((own - ours).abs().max() / own.abs().max().clamp_min(torch.finfo(own.dtype).tiny))
        proof = Proof("logits through our head against the model's own", error, _HEAD_TOLERANCE)
        if not proof.holds:
            raise EnvironmentProblem(
                f"model.path: a model of kind {lm.config.model_type} computes its logits in a way that this "
                f"program does not follow (relative difference {error:.1e}), so its loss would be wrong. "
                "Choose another model."
            )
        return proof

    def _first_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's own and ours, of the first tokens."""
        lm = self.language_model
        ids = batch.ids[:1, :_CHECKED]
        positions = batch.positions[:1, :_CHECKED] + self.first_position
        own = lm(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
        hidden = lm.base_model(input_ids=ids, position_ids=positions, use_cache=False)[0]
        return own, self.head(hidden[0]).float()

    def _pooled_logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The model's own of whole documents, positions and pooling its own; and ours, of the states that we take."""
        lm = self.language_model
        own, ours = [], []
        for at, start, length in zip(batch.label_rows.tolist(), batch.starts, batch.lengths, strict=False):
            ids = batch.ids.flatten()[start : start + length][None]
            types = batch.token_type_ids
            sides = None if types is None else types.flatten()[start : start + length][None]
            own.append(lm(input_ids=ids, use_cache=False, **self._sides(sides)).logits[0])
            hidden = lm.base_model(input_ids=ids, use_cache=False, **self._sides(sides))[0]
            ours.append(
                self.head(hidden[0, at - start][None])[0]
            )  # alone: several would be rounded otherwise
            if len(own) == _DOCUMENTS:
                break
        return torch.stack(own).float(), torch.stack(ours).float()


_CHECKED = 64  # tokens
_DOCUMENTS = 4
