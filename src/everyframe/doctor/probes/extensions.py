"""Probe of optional packages that others import by themselves: a broken one breaks diffusers.

Everyframe uses none of them. Read next: `everyframe.doctor.probes`.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import Any

from everyframe.doctor.probes import outcome

_MODULES = ("flash_attn", "flash_attn_interface", "xformers", "sageattention", "triton", "apex")


def extensions(device: str) -> dict[str, Any]:
    """Import each of `_MODULES` that is installed. `device` is not used."""
    wrong, versions = [], {}
    for name in _MODULES:
        if util.find_spec(name) is None:
            continue
        try:
            module = import_module(name)
        except Exception as error:  # noqa: BLE001 - an extension may raise anything
            text = " ".join(str(error).split())[:200]
            wrong.append(f"{name} can't be imported: {type(error).__name__}: {text}")
            continue
        versions[name] = str(getattr(module, "__version__", "?"))
    return outcome(wrong, versions=versions)
