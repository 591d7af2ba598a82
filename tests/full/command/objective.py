"""What the function that Hydra calls returns, as a sweeper of Hydra's would see it; run by the zygote."""

import sys

from hydra import compose, initialize_config_dir

from app import train
from app.config.groups import CONF
from app.config.load import VERSION_BASE, store_schema, validated_arguments


def main() -> None:
    overrides = validated_arguments(sys.argv[1:])
    store_schema()
    with initialize_config_dir(str(CONF), version_base=VERSION_BASE):
        config = compose("config", overrides=overrides, return_hydra_config=True)
    print(f"returned {train.train_under_hydra(config)!r}")
