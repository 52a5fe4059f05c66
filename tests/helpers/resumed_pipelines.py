"""A pipeline's run by a lossy method, interrupted after a step and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import everyframe
from everyframe.core.errors import EveryframeWarning
from everyframe.core.events import Event, Step
from everyframe.core.quality import LossyMethod, SamplingMethod
from everyframe.runs.folder import all_runs


class _EnoughError(Exception):
    pass


def check_resumed_equals_unbroken(
    pipe: Any, asked: Mapping[str, Any], method: SamplingMethod, after: int
) -> None:
    """Break the run off after that step; the resumed one has the frames of an unbroken one.

    A method with a limit passes it, with its warning. The folder of runs has to be empty.
    """

    def stop(event: Event) -> None:
        if isinstance(event, Step) and event.step == after:
            raise _EnoughError

    with pytest.raises(_EnoughError):
        everyframe.run(pipe, **{**asked, "method": LossyMethod(method)}, on_event=stop)
    (run,) = all_runs()
    with pytest.warns(EveryframeWarning):
        resumed = everyframe.resume(run.name, pipe=pipe, output="float")
    if method.limit is None:
        whole = everyframe.run(pipe, **{**asked, "method": LossyMethod(method)})
    else:
        with pytest.warns(EveryframeWarning, match="all steps from here are exact"):
            whole = everyframe.run(pipe, **{**asked, "method": LossyMethod(method)})
    np.testing.assert_array_equal(resumed.frames, whole.frames)
