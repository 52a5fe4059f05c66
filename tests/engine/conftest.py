"""A tiny Open-Sora 1.2, and an unbroken run of it, for each file that asks."""

from __future__ import annotations

import pytest

from engine.test_resume import OPEN_SORA, begun
from everyframe.core.events import Event
from helpers.tiny_checkpoints import opensora as tiny_opensora


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_opensora.opensora_1_2(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """An unbroken run."""
    return list(begun(tmp_path_factory.mktemp("runs"), model=model, **OPEN_SORA))
