"""Small denoisers that ranks share, one of each family and way."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.sharded_denoisers.base import SmallDenoiser
from helpers.sharded_denoisers.opensora import OpenSora
from helpers.sharded_denoisers.stepvideo import StepVideo
from helpers.sharded_denoisers.svd import VideoUNet

DENOISERS: Mapping[str, SmallDenoiser] = {
    "opensora-1.0": OpenSora("1.0"),
    "opensora-1.2": OpenSora("1.2"),
    "stepvideo-ulysses": StepVideo("ulysses"),
    "stepvideo-ring": StepVideo("ring"),
    "svd": VideoUNet(),
}
