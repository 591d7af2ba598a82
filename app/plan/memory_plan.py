"""What a plan is made for, and what it says."""

from dataclasses import dataclass

from app.batch import Batch
from app.engine.counting import Event

# What is there from step to step.
KEPT = ("frozen_weights", "quantization_constants", "trained_weights", "gradients", "optimizer_states")
# How the bytes at the peak are divided; they add up to it.
ANATOMY = (
    *KEPT,
    "borrowed_weights",  # of layers that are computed, kept by other processes
    "saved_activations",  # kept from forward for backward
    "temporary",  # of forward, backward and optimizer; what is computed again counts here
    "loss_head",  # logits and what is made of them
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one micro-batch, what decides how large tensors get."""

    rows: int
    width: int  # positions of each row
    documents: tuple[
        int, ...
    ]  # lengths of what lies side by side, filling included; () where rows are padded
    places: int  # for documents; 0 where rows are padded
    longest: int  # tokens of a document, as kernels are told
    label_rows: int  # rows that go through the head
    micro_batches: int = 1  # of one step and one process
    weighted: bool = False  # whether labels count differently
    pairs: bool = False  # whether the model is told of the sides of pairs

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch, padding included."""
        return self.rows * self.width

    @classmethod
    def of(cls, batch: Batch, micro_batches: int = 1) -> "Shape":
        """That of a batch."""
        documents = batch.documents
        rows, width = batch.ids.shape
        return cls(
            rows=rows,
            width=width,
            documents=() if documents is None else documents.lengths,
            places=0 if documents is None else len(documents.bounds) - 1,
            longest=width if documents is None else documents.longest,
            label_rows=len(batch.label_rows),
            micro_batches=micro_batches,
            weighted=batch.weights is not None,
            pairs=batch.segments is not None,
        )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes as `torch.cuda.max_memory_allocated` would count them; what allocator and driver need comes on top."""

    phases: dict[str, int]  # the most while in it, in their order; save and evaluation come last
    peak_bytes: int
    peak_where: str  # one of the phases
    anatomies: dict[str, dict[str, int]]  # of each phase, by ANATOMY
    kept_bytes: int  # from one step to the next, gradients included
    host_bytes: int  # optimizer states that are paged to the host
    flops_per_token: float  # of training with nothing computed twice, over positions of the micro-batch
    flops: float  # of the step as it runs: all micro-batches, what is computed again, the optimizer
    fp8_flops: float  # of these, in fp8
    events: tuple[Event, ...] | None  # of the step, what is kept first; None where depth was extrapolated
    traced_layers: int  # of the trace; all of them where nothing was extrapolated
    offloaded_bytes: int = 0  # inputs of layers that wait on the host, of a micro-batch
    divided: bool = False  # whether gradients and states are those of one of several processes
    few_events: tuple[Event, ...] = ()  # those of the trace, where depth was extrapolated

    @property
    def anatomy(self) -> dict[str, int]:
        """Of the peak, by ANATOMY; adds up to it."""
        return self.anatomies[self.peak_where]
