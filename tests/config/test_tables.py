"""Names of conf/ equal the entries of the table that owns the kind."""

from collections.abc import Iterable
from typing import Any

import pytest

from app.adapters.adapters import ADAPTERS
from app.config.adapters import ADAPTER_KINDS
from app.config.conf_files import choices_by_group
from app.config.finished_run import COMPRESSED, EXPORT_KINDS
from app.config.kinds import OWN, PREFERENCE_KINDS, QUANTIZATION_KINDS, ROW_FORMATS
from app.config.schema import BatchingConfig, DatasetConfig
from app.config.tasks import TASKS
from app.config.validate import CHOICES
from app.data.formats import READERS
from app.data.loader import ORDERS
from app.data.row_pipeline import POLICIES
from app.exports.compressed_tensors import FORMATS
from app.exports.export import EXPORTS
from app.layers.attention import BACKENDS
from app.layers.quantization import QUANTIZATIONS
from app.model.build import DTYPES
from app.optim.lr_schedule import SCHEDULES
from app.optim.optimizers import OPTIMIZERS
from app.tasks.preference import LABEL_PREFERENCES, PREFERENCES
from app.tasks.table import IMPLEMENTATIONS
from app.tracking.trackers import TRACKERS


@pytest.mark.parametrize(
    ("group", "table"),
    [
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULES),
        ("adapter", ADAPTERS),
        ("adapter", ADAPTER_KINDS),
        ("tracker", TRACKERS),
        ("attention", (*BACKENDS, OWN, "auto")),
        ("precision", (*DTYPES, "auto")),
        ("quantization", QUANTIZATIONS),
        ("quantization", QUANTIZATION_KINDS),
        ("preference", ("none", *PREFERENCES, *LABEL_PREFERENCES)),
        ("preference", PREFERENCE_KINDS),
        ("task", IMPLEMENTATIONS),
        ("task", TASKS),
    ],
)
def test_tables_match_conf_files(group: str, table: Iterable[str]) -> None:
    assert set(choices_by_group()[group]) == set(table)


def choices_of(name: str) -> tuple[str, ...]:
    field: Any = DatasetConfig.__dataclass_fields__[name]
    choices: tuple[str, ...] = field.metadata[CHOICES]
    return choices


def test_tables_match_dataset_choices() -> None:
    assert set(choices_of("format")) == {"auto", *READERS} == {"auto", *ROW_FORMATS}
    assert set(choices_of("on_overflow")) == {"auto", "error", *POLICIES}
    assert set(choices_of("train_on")) == {part for each in ROW_FORMATS.values() for part in each.train_on}


def test_table_matches_orders_of_rows() -> None:
    order: Any = BatchingConfig.__dataclass_fields__["order"]
    assert set(order.metadata[CHOICES]) == set(ORDERS)


def test_table_matches_kinds_of_export() -> None:
    assert EXPORT_KINDS.keys() == EXPORTS.keys()
    assert FORMATS.keys() == set(COMPRESSED)
