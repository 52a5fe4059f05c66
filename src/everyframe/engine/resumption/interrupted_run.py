"""An interrupted run as read from its folder; `resume.py` continues it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everyframe.core.errors import CorruptRunError
from everyframe.core.events import Repaired
from everyframe.core.plan import Plan
from everyframe.core.request import Request
from everyframe.core.serialization import from_jsonable
from everyframe.engine.resumption.foreign_run import (
    check_named,
    with_named,
    without_decoder,
)
from everyframe.engine.resumption.replan import applied_fallbacks
from everyframe.runs.checksummed_json import UNREADABLE, read_json
from everyframe.runs.folder import RunFolder
from everyframe.runs.resume_hint import resume_command
from everyframe.runs.signature import check_files
from everyframe.runs.tensor_store import TensorStore


@dataclass(frozen=True)
class InterruptedRun:
    """An interrupted run as read from its folder.

    Attributes:
        folder: the run folder.
        request: the original request.
        plan: the original plan.
        record: the record of the run.
        place: working folder in which the run began.
        output: requested output path.
        as_uint8: whether frames are saved as uint8.
        given: digests of an in-memory model by component; None for any other model.
        fallbacks: memory fallbacks applied to all ranks so far.
        is_own: whether this user's Everyframe wrote it.
        named: options that the person who resumes gave again.
    """

    folder: RunFolder
    request: Request
    plan: Plan
    record: dict[str, Any]
    place: Path
    output: str | None
    as_uint8: bool
    given: dict[str, str] | None = None
    fallbacks: tuple[Repaired, ...] = ()
    is_own: bool = False
    named: frozenset[str] = frozenset()

    @property
    def place_of_workers(self) -> Path | None:
        """Working folder of workers that resume it: where this user's run began, if it is there."""
        return self.place if self.folder.is_own() and self.place.is_dir() else None

    def with_named(self, named: Mapping[str, Any] | None) -> InterruptedRun:
        """The run with options named again, which lies here wherever it began; None trusts it.

        Raises:
            InputError: a stranger's run, and not all that it asks for was named; `check_named`.
        """
        if named is None:
            return replace(self, is_own=True)
        is_own = check_named(self.folder, named)
        request = with_named(self.request, named)
        plan = replace(self.plan, model=str(named.get("model", self.plan.model)))
        if not is_own:
            request, plan = without_decoder(request, plan)
        return replace(
            self,
            request=request,
            plan=plan,
            place=self.place if is_own else Path.cwd(),
            is_own=is_own,
            named=frozenset(named),
        )


def load_run(folder: RunFolder) -> InterruptedRun:
    """Load a run from its folder.

    Raises:
        CorruptRunError: the folder has no run, or its files are corrupt.
    """
    check_files(folder.path)
    fetch = TensorStore(folder.given).fetch
    try:
        written = folder.run()
        request, plan = (from_jsonable(written[name], fetch) for name in ("request", "plan"))
        found = InterruptedRun(
            folder=folder,
            request=request,
            plan=plan,
            record=dict(written["record"]),
            place=Path(written["place"]),
            output=written["output"],
            as_uint8=bool(written["as_uint8"]),
            given=written["given"],
            fallbacks=applied_fallbacks(written.get("fallbacks", ())),
        )
        for path in folder.path.glob("oom_events*.json"):
            # Without them the bits may differ: the steps after it used them.
            read_json(path)
    except CorruptRunError as error:
        raise error.reworded(
            f"{error}; {folder.name} cannot be resumed; generate it again from the start "
            f"({resume_command(folder)} --forget removes it)"
        ) from error
    except UNREADABLE as error:
        raise CorruptRunError(f"{folder.path} can't be read: {error!r}") from error
    if not isinstance(request, Request) or not isinstance(plan, Plan):
        raise CorruptRunError(f"{folder.path} holds no request and plan")
    return found
