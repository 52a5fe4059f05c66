"""Amounts of memory as people write them: ``8GB``, ``7.5 GiB``, ``500MB``, or plain bytes.

Read next: `everyframe.planning.forecast`, which writes them.
"""

from __future__ import annotations

import re

from everyframe.core.errors import InputError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}

_WRITTEN = re.compile(r"\s*(\d{1,20}(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(written: str, name: str) -> int:
    """Bytes of an amount of memory; `name` is the option that it was given to.

    Raises:
        InputError: no amount, or nothing at all.
    """
    found = _WRITTEN.fullmatch(written)
    unit = found[2].lower() if found else None
    if found is None or unit not in _UNITS:
        raise InputError(f"{name} must be an amount such as 8GB, 7.5GiB or 500MB, got {written!r}")
    size = int(float(found[1]) * _UNITS[unit])
    if size <= 0:
        raise InputError(f"{name} must be more than nothing, got {written!r}")
    return size
