"""Files of the splits of a local folder, found as `datasets` does: by `configs` in README.md, or by file names."""

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.errors import DataError, first_line


def files_of_splits(named: str, place: Path, hub_config: str | None, files: Sequence[Path]) -> dict[str, list[Path]]:
    """The files of each split; empty where nothing says that there are several.

    Files that no split claims are `train` where none is called so.
    """
    import yaml
    from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns, sanitize_patterns

    root = place.resolve()
    try:
        section = _read_me_section(named, place, hub_config)
        base = glob.escape(str(root / section.get("data_dir", "")))
        given = section.get("data_files")
        patterns = sanitize_patterns(given) if given else get_data_patterns(base)
        found = DataFilesDict.from_patterns(patterns, base_path=base)
    except EmptyDatasetError:
        return {}
    except (FileNotFoundError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{named}: README.md or file names do not tell its splits: {first_line(error)}") from error
    known = {str(root / file.relative_to(place)): file for file in files}
    splits = {str(name): [known[each] for each in sorted(set(paths)) if each in known] for name, paths in found.items()}
    splits = {name: paths for name, paths in splits.items() if paths}
    unclaimed = [file for file in files if not any(file in each for each in splits.values())]
    if splits and "train" not in splits and unclaimed and not section:
        splits["train"] = unclaimed
    return {} if set(splits) == {"train"} and not section else splits


def _read_me_section(named: str, place: Path, hub_config: str | None) -> Mapping[str, Any]:
    """Section of `configs` in the folder's README.md for the wanted configuration; empty without any."""
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import metadata_load

    card: Any = metadata_load(place / "README.md") if (place / "README.md").is_file() else None
    configs = MetadataConfigs.from_dataset_card_data(card or {})
    name = hub_config or configs.get_default_config_name()
    if configs and name not in configs:
        given = f"dataset.hub_config={hub_config} is not one of them" if hub_config else "none of them is the default"
        raise DataError(
            f"{named}: its configurations are {', '.join(configs)}, and {given}. Choose one, such as"
            f" dataset.hub_config={next(iter(configs))}"
        )
    return configs[name] if configs and name is not None else {}
