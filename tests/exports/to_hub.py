"""app.export in a fork, whose hub library was imported with other settings: it takes those of its environment."""

import os

from huggingface_hub import constants

from app import export


def main() -> None:
    constants.ENDPOINT = os.environ.get("HF_ENDPOINT", constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = False
    constants.HF_HUB_DISABLE_XET = True
    constants.HF_TOKEN_PATH = os.environ.get("HF_HOME", "nowhere") + "/token"
    export.main()
