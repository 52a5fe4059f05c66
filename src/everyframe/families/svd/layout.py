"""Which frames and which pixels are here while the video UNet is computed, and how that changes.

What works in space needs all pixels of a frame, what works in time all frames of a pixel. `Layout`
is that of one device, which has everything: nothing moves. Several ranks put another one in its
place (`sharding.py`). Read next: `unet.py`, which asks it.

Shapes: (b, r, S, C) are frames with all of their pixels, (b, T, s, C) pixels with all of their
frames; a table (B, C) has a row for each branch.
"""

from __future__ import annotations

from torch import Tensor, nn

from everyframe.ops.norm import Statistics


class Layout:
    """Everything is here.

    The statistics are for norms over all frames and pixels of a branch, asked with some frames
    (b, C, r, H, W) or with some pixels (b, C, T, h, w).
    """

    frame_statistics: Statistics | None = None
    pixel_statistics: Statistics | None = None

    def over_time(self, x_brSC: Tensor, reader: nn.Module | None = None) -> Tensor:
        """From frames to pixels, (b, T, s, C); `reader` is what takes it next, if that multiplies.

        Nobody else sees what came, so it may be changed in place.
        """
        return x_brSC

    def over_space(self, x_bTsC: Tensor) -> Tensor:
        """From pixels back to frames, (b, r, S, C)."""
        return x_bTsC

    def of_frames(self, table_BC: Tensor) -> Tensor:
        """The branch's row for each frame here; broadcasts to (b, r, C)."""
        return table_BC[:, None]

    def of_pixels(self, table_BC: Tensor) -> Tensor:
        """The branch's row for each pixel here; broadcasts to (b, T, s, C)."""
        return table_BC[:, None, None]


WHOLE = Layout()
