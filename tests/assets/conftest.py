import random

import pytest


@pytest.fixture
def seeded() -> random.Random:
    return random.Random(7)
