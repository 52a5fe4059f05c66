"""What an import of torchao logs is kept from people, and its errors are not."""

from __future__ import annotations

import logging

import pytest

from everyframe.core.import_logs import mute_torchao_imports


@pytest.mark.parametrize("name", ["torchao", "torchao.kernel.intmm", "torch.utils._pytree"])
def test_warnings_are_muted_and_errors_are_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "handlers", [Seen()])
    logger.setLevel(logging.WARNING)
    logger.warning("before")
    mute_torchao_imports()
    logger.setLevel(logging.WARNING)  # as torch does where it is imported
    logger.warning("muted")
    logger.error("shown")
    assert seen == ["before", "shown"]
