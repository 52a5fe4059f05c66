"""Build a request from command line flags and an optional record.

`options.py` defines the flags, `everyframe.core.request` their meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from everyframe.cli.streams import print_message
from everyframe.core.errors import InputError
from everyframe.core.request import Request
from everyframe.engine.records.record_schema import option_facts
from everyframe.engine.workers.torchrun import under_torchrun
from everyframe.families.registry import all_options
from everyframe.planning.config_files import (
    default_options,
    unknown_variables,
    without_displaced,
)


@dataclass(frozen=True)
class ParsedRequest:
    """A request, and the record that it repeats, if any."""

    request: Request
    record: Mapping[str, Any] | None = None

    @property
    def num_threads(self) -> int | None:
        if self.record is None:
            return None
        from everyframe.engine.records.recorded_request import threads_to_repeat

        return threads_to_repeat(self.record)


def parse_request(
    given: Mapping[str, Any], from_record: str | None, *, without: Collection[str] = ()
) -> ParsedRequest:
    """Build a request from options by name, on top of a file's record if given.

    A prompt of ``-`` is read from standard input. Under torchrun the number of devices is that of
    the ranks. Configuration sets what is not given, apart from the options `without`; on top of a
    record, only what a record may not set.

    Raises:
        InputError: an option is invalid.
    """
    values = {name: _validate_option(name, value) for name, value in given.items()}
    ranks = under_torchrun()
    configured = _find_configured(values, without, is_repeat=from_record is not None)
    if ranks is not None:
        configured = {n: v for n, v in configured.items() if n not in ("devices", "num_devices")}
    values = {**configured, **values}
    if ranks is not None:
        values |= ranks.options(values)
    if "prompt" in values:
        values["prompt"] = _prompt(values["prompt"])
    if from_record is None:
        return ParsedRequest(Request(**values))
    from everyframe.engine.records.recorded_request import request_from
    from everyframe.media.record import read_record

    record = read_record(from_record)
    return ParsedRequest(request_from(record, values), record)


def with_model(given: Mapping[str, Any], named: str | None) -> dict[str, Any]:
    """Options with the model that a positional argument names, if it does.

    Raises:
        InputError: ``--model`` names one too.
    """
    if named is None:
        return {**given}
    if given.get("model") is not None:
        raise InputError(f"the model is named twice: {named} and --model {given['model']}")
    return {**given, "model": named}


def _find_configured(
    given: Mapping[str, Any], without: Collection[str], *, is_repeat: bool
) -> dict[str, Any]:
    """Options that configuration sets and this call leaves open.

    One line names those of a project's file, which a person may not know of.
    """
    found = {
        name: default
        for name, default in without_displaced(default_options(given.get("model")), given).items()
        if name not in without and (not is_repeat or option_facts(name)["person_only"])
    }
    ranks = under_torchrun()
    if ranks is None or ranks.rank == 0:
        names = [name for name, default in found.items() if default.is_of_project]
        if names:
            print_message(f"note: the project's configuration sets {', '.join(names)}"
                 " (see everyframe config show)")  # fmt: skip
        for line in unknown_variables():
            print_message(f"note: {line}")
    return {name: default.value for name, default in found.items()}


def _validate_option(name: str, value: Any) -> Any:
    """Validate a family option by that family's field; `Request` validates common ones."""
    if name in Request.model_fields:
        return value
    owner = next(options for options in all_options().values() if name in options.model_fields)
    return getattr(owner(**{name: value}), name)


def _prompt(written: str) -> str:
    if written != "-":
        return written
    try:
        return sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on standard input is not UTF-8 text: {error}") from None
