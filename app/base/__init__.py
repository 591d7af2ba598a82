"""Sources of weights: config.json, files and their names, tokenizer, and the model on meta that they fill."""

import logging

# transformers imports torchao if installed, which logs the parts that this machine cannot load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
