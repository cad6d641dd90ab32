"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.checkpoints import resolve


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 checkpoint: where RAYCOMB_SMOLLM2 says, else found or fetched by its name."""
    told = os.environ.get("RAYCOMB_SMOLLM2")
    return Path(told) if told else resolve("smollm2-135m")
