"""Where weights come from: config.json, files and their names, tokenizer, a structure on meta that is filled."""

import logging

# transformers imports torchao where it is installed, which logs what of it this machine cannot load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
