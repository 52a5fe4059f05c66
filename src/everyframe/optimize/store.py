"""Where certificates are kept: a small JSON file a device and model, in our cache folder.

A file is replaced as a whole, so a reader sees the one before or the one after. What can't be read
is taken as not there, and the next run makes it again; where nothing can be written certificates
last as long as the process. Read next: `certify`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from everyframe.checkpoints.places import cache_folder, write_beside
from everyframe.optimize.certificate import Certificate, from_json

_log = logging.getLogger(__name__)

_SCHEMA = "everyframe.certificates/1"

#: What could not be written, for this process.
_UNWRITTEN: dict[Path, dict[str, Certificate]] = {}


def folder() -> Path:
    """The folder of all certificates."""
    return cache_folder() / "certificates"


def find(device: str, plan: str) -> dict[str, Certificate]:
    """The certificates of this device and plan by the names of their paths."""
    path = _file(device, plan)
    found = {**_read(path), **_UNWRITTEN.get(path, {})}
    # A file says for whom it is; one that was copied from elsewhere is for nobody here.
    return {
        name: each for name, each in found.items() if (each.device, each.plan) == (device, plan)
    }


def keep(certificates: Iterable[Certificate]) -> None:
    """Keep these beside the others, in place of older ones of the same name."""
    by_file: dict[Path, list[Certificate]] = {}
    for each in certificates:
        by_file.setdefault(_file(each.device, each.plan), []).append(each)
    for path, new in by_file.items():
        kept = {**_read(path), **{each.what: each for each in new}}
        try:
            _write(path, kept)
        except OSError as error:
            _log.warning("certificates can't be kept in %s (%s)", path.parent, error.strerror)
            _UNWRITTEN.setdefault(path, {}).update(kept)


def _file(device: str, plan: str) -> Path:
    return folder() / device / f"{plan}.json"


def _read(path: Path) -> dict[str, Certificate]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("certificates in %s can't be read (%s); they are made again", path, error)
        return {}
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if not isinstance(whole, dict) or whole.get("schema") != _SCHEMA:
        _log.warning("%s is damaged; its certificates are made again", path)
        return {}
    listed = whole.get("certificates")
    found = [from_json(each) for each in listed] if isinstance(listed, list) else []
    return {each.what: each for each in found if each is not None}


def _write(path: Path, certificates: dict[str, Certificate]) -> None:
    whole = {"schema": _SCHEMA, "certificates": [each.to_json() for each in certificates.values()]}
    write_beside(path, json.dumps(whole, indent=1))
