"""`python -m app train recipe=lora` runs `finetune train recipe=lora`."""

import os

from app.main import main
from app.program import STARTED_AS

if __name__ == "__main__":
    os.environ.setdefault(STARTED_AS, "python -m app")
    main()
