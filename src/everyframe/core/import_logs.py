"""Mute what torchao's import logs, in a process that is ours: the command line and its workers.

transformers and diffusers import torchao where it is installed. It then logs each of its libraries
that is for another device, torch warns of its enumerations and diffusers of a renamed module.
"""

from __future__ import annotations

import logging

_LOGGERS = (
    "torchao", "torchao.kernel.intmm", "torch.utils._pytree",
    "diffusers.quantizers.torchao.torchao_quantizer",
)  # fmt: skip


def mute_torchao_imports() -> None:
    """Leave errors alone of what its loggers log; by filters, as torch sets levels again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
