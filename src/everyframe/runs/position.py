"""How far the saved state of a run is, as a value that grows with each save."""

from __future__ import annotations

from everyframe.core.errors import CorruptRunError
from everyframe.runs.checksummed_json import UNREADABLE
from everyframe.runs.folder import RunFolder

#: Finished clips, stages and steps, each summed over the video groups, and saved model calls.
Position = tuple[int, int, int, int]

#: Position of a run that has saved nothing.
NOWHERE: Position = (0, 0, 0, 0)


def saved_position(run: RunFolder) -> Position:
    """The position of a run; what can't be read counts as zero.

    Positions are ordered: a further clip or stage outweighs any number of steps.
    """
    clips = stages = steps = 0
    for part in run.parts():
        try:
            state = part.state()
            if state is not None:
                done = sum(video["step"] for video in state["takes"])
                clips, stages, steps = clips + state["clip"], stages + state["stage"], steps + done
        except (CorruptRunError, *UNREADABLE):
            continue
    return clips, stages, steps, run.num_answers()
