"""Open-Sora's denoisers by their sizes; the modules are in `stdit` (1.0) and `stdit3` (1.2)."""

from __future__ import annotations

from everyframe.families.opensora.config import STDiT3Config, STDiTConfig
from everyframe.families.opensora.stdit import STDiT
from everyframe.families.opensora.stdit3 import STDiT3
from everyframe.families.text_context import TextContext

__all__ = ["STDiT", "STDiT3", "TextContext", "build_model"]


def build_model(config: STDiTConfig | STDiT3Config) -> STDiT | STDiT3:
    """The module of these sizes; make it under ``torch.device("meta")`` if weights are to come."""
    return STDiT3(config) if isinstance(config, STDiT3Config) else STDiT(config)
