"""From a folder or numbers to a module that takes a Batch and returns its loss."""

import logging

# transformers imports torchao where it is installed, which logs what of it this machine cannot load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
