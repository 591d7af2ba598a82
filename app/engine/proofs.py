"""What is proven of a model before its first step, on the data it will see."""

import torch

from app.batch import Batch
from app.data.loader import Loader
from app.model.probe import check_packing
from app.model.trainee import Trainee


def prove(trainee: Trainee, loader: Loader, device: torch.device) -> None:
    """The head gives the model's own logits, and packed documents those of separate ones; else the run is refused."""
    fullest = max(loader.batches(0), key=lambda batch: batch.num_tokens)  # some may be empty
    prove_on(trainee, fullest.to(device))


def prove_on(trainee: Trainee, batch: Batch) -> None:
    """The same on one batch."""
    trainee.check_head(batch)
    check_packing(trainee, batch)
