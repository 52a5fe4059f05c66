"""What other ranks made, brought to rank 0, where nobody else is there to hear it.

Under torchrun each rank's worker is heard by a process of its own, maybe on another machine, and
rank 0's alone writes. Videos that other groups of ranks made come to it when its own are done.
Read next: `ranks.py`; `wire.py`, whose messages these are, only that they go from rank to rank.
"""

from __future__ import annotations

import numpy as np
import torch

from everyframe.core.events import Event, Events, Frames, Note, Repaired, Sound, VideoDone, event_of
from everyframe.engine.ranks import Here
from everyframe.media.pixels import to_uint8
from everyframe.parallel.coming import Sending
from everyframe.parallel.team import Team

_WHAT = "videos are handed over"


def gathered(events: Events, here: Here) -> Events:
    """On rank 0 the events of all groups, one group after the other; elsewhere this rank's own."""
    world = here.teams.world
    if world.is_lead:
        yield from events
        for source in here.sources:
            while (event := _received(world, source)) is not None:
                yield event
    elif world.rank in here.sources:
        # Not awaited before all is done: rank 0 has work of its own.
        sent: list[Sending] = []
        for event in events:
            if isinstance(event, Frames | Sound | VideoDone | Note | Repaired):
                sent.append(_sent(world, event))
            yield event
        sent.append(world.send([], None, 0, _WHAT))
        for each in sent:
            each.wait()
    else:
        yield from events


def _sent(world: Team, event: Event) -> Sending:
    """The event on its way to rank 0, frames as the bytes that are written."""
    if isinstance(event, Frames):
        frames = torch.from_numpy(np.ascontiguousarray(to_uint8(event.frames)))
        return world.send([frames], {"type": event.type, "seed": event.seed}, 0, _WHAT)
    if isinstance(event, Sound):
        samples = torch.from_numpy(np.ascontiguousarray(event.samples))
        return world.send([samples], event.to_json(), 0, _WHAT)
    return world.send([], event.to_json(), 0, _WHAT)


def _received(world: Team, source: int) -> Event | None:
    """The next event of that rank; None after its last."""
    tensors, told = world.receive(source, _WHAT)
    if told is None:
        return None
    kind = told["type"]
    if kind == Frames.type:
        return Frames(told["seed"], len(tensors[0]), tensors[0].numpy())
    if kind == Sound.type:
        return Sound(told["seed"], told["rate"], told["seconds"], tensors[0].numpy())
    if kind == VideoDone.type:
        return VideoDone(told["seed"], told["num_frames"], told["record"])
    return event_of(told)
