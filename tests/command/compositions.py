"""app.train, and how often it composed conf/; run by the zygote."""

from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl

from app import train


def main() -> None:
    load, compositions = ConfigLoaderImpl.load_configuration, list[Any]()

    def counted(loader: Any, config_name: Any, overrides: Any, *others: Any, **options: Any) -> Any:
        compositions.append(overrides)
        return load(loader, config_name, overrides, *others, **options)

    setattr(ConfigLoaderImpl, "load_configuration", counted)  # noqa: B010  (a method)
    try:
        train.main()
    finally:
        print(f"{len(compositions)} compositions")
