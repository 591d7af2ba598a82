"""What is proven of a model before its first step, on the data it will see."""

import torch

from app.data.loader import Loader
from app.model.probe import check_packing
from app.model.trainee import Trainee


def prove(trainee: Trainee, loader: Loader, device: torch.device) -> None:
    """The head gives the model's own logits, and packed documents those of separate ones; else the run is refused."""
    fullest = max(loader.batches(0), key=lambda batch: batch.num_tokens).to(device)  # some may be empty
    trainee.check_head(fullest)
    check_packing(trainee, fullest)
