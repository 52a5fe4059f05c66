"""Small denoisers that ranks share, one of each family and backend."""

from __future__ import annotations

from collections.abc import Mapping

from helpers.sharded_denoisers.base import SmallDenoiser
from helpers.sharded_denoisers.opensora import OpenSora
from helpers.sharded_denoisers.opensora2 import PAIRED, OpenSora2
from helpers.sharded_denoisers.stepvideo import StepVideo
from helpers.sharded_denoisers.svd import VideoUNet

DENOISERS: Mapping[str, SmallDenoiser] = {
    "opensora-1.0": OpenSora("1.0"),
    "opensora-1.2": OpenSora("1.2"),
    "opensora2-ulysses": OpenSora2("ulysses"),
    "opensora2-ring": OpenSora2("ring"),
    "opensora2-first-picture": OpenSora2("ulysses", PAIRED),
    "stepvideo-ulysses": StepVideo("ulysses"),
    "stepvideo-ring": StepVideo("ring"),
    "svd": VideoUNet(),
}
