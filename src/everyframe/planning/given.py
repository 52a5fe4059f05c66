"""What comes with a request is opened before it is planned, so that what is none is told at once.

Of a video the first frame; the rest is read where it is needed. Not here: what a family's own
options name, which it reads when it settles them. Read next: `everyframe.engine.given`.
"""

from __future__ import annotations

import os

from everyframe.core.request import Request


def check_given(request: Request) -> None:
    """Raise `MediaError` for a picture or video of the request that can't be read."""
    pictures = [each for each in (request.image, request.last_image) if each is not None]
    is_file = isinstance(request.extend, (str, os.PathLike))
    if not pictures and not is_file:
        return
    # Not on top: they bring NumPy, which most requests don't need yet.
    from everyframe.media.frames import open_frames
    from everyframe.media.read import read_image

    for picture in pictures:
        read_image(picture)
    if is_file:
        next(open_frames(request.extend, what="extend").read(), None)
