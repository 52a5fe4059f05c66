"""Open-Sora 1.2's named sizes: which height and width each resolution has at each aspect ratio.

The numbers are upstream's (`opensora/datasets/aspect.py` of 1.2): the sizes that its weights were
trained on. Upstream writes ratios as height:width; here they are width:height, as everywhere in
Everyframe. Not here: what the autoencoder makes of a size that it can't divide (`family.py`).
"""

from __future__ import annotations

from everyframe.core.errors import InputError, did_you_mean

#: Width to height, in the order of the rows below: from wide to tall.
ASPECTS = (
    "8:3", "21:9", "25:12", "2:1", "17:9", "50:27", "16:9", "8:5", "3:2",
    "4:3", "1:1", "3:4", "2:3", "9:16", "9:17", "1:2", "12:25",
)  # fmt: skip

#: (height, width) of each resolution, one for each of ASPECTS.
SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "144p": (
        (117, 312), (125, 291), (133, 277), (135, 270), (139, 262), (141, 260), (144, 256),
        (151, 241), (156, 234), (166, 221), (192, 192), (221, 165), (235, 156), (256, 144),
        (263, 139), (271, 135), (277, 132),
    ),
    "240p": (
        (196, 522), (210, 490), (222, 462), (226, 452), (232, 438), (236, 436), (240, 426),
        (252, 404), (262, 393), (276, 368), (320, 320), (370, 278), (392, 262), (426, 240),
        (440, 232), (452, 226), (462, 222),
    ),
    "360p": (
        (294, 784), (314, 732), (332, 692), (340, 680), (350, 662), (352, 652), (360, 640),
        (380, 608), (392, 588), (416, 554), (480, 480), (554, 416), (588, 392), (640, 360),
        (660, 350), (678, 340), (692, 332),
    ),
    "480p": (
        (392, 1046), (420, 980), (444, 925), (452, 904), (466, 880), (470, 870), (480, 854),
        (506, 810), (522, 784), (554, 738), (640, 640), (740, 555), (784, 522), (854, 480),
        (880, 466), (906, 454), (924, 444),
    ),
    "720p": (
        (588, 1568), (628, 1466), (666, 1388), (678, 1356), (698, 1318), (706, 1306), (720, 1280),
        (758, 1212), (784, 1176), (832, 1110), (960, 960), (1108, 832), (1176, 784), (1280, 720),
        (1320, 698), (1358, 680), (1386, 666),
    ),
    "1080p": (
        (882, 2352), (942, 2198), (998, 2080), (1018, 2036), (1048, 1980), (1058, 1958),
        (1080, 1920), (1138, 1820), (1176, 1764), (1248, 1664), (1440, 1440), (1662, 1246),
        (1764, 1176), (1920, 1080), (1980, 1048), (2036, 1018), (2078, 998),
    ),
    "2k": (
        (1176, 3136), (1256, 2930), (1330, 2770), (1358, 2716), (1398, 2640), (1412, 2612),
        (1440, 2560), (1518, 2428), (1568, 2352), (1662, 2216), (1920, 1920), (2218, 1664),
        (2352, 1568), (2560, 1440), (2638, 1396), (2716, 1358), (2772, 1330),
    ),
    "4k": (
        (1764, 4704), (1886, 4400), (1996, 4158), (2036, 4072), (2096, 3960), (2118, 3918),
        (2160, 3840), (2276, 3642), (2352, 3528), (2494, 3326), (2880, 2880), (3326, 2494),
        (3528, 2352), (3840, 2160), (3958, 2096), (4072, 2036), (4156, 1994),
    ),
}  # fmt: skip

DEFAULT_ASPECT = "16:9"


def named_size(resolution: str, aspect: tuple[int, int] | None) -> tuple[int, int]:
    """(height, width) in pixels of a named resolution; `aspect` is (width, height).

    Raises `InputError` for a name or ratio that 1.2's table does not hold.
    """
    rows = SIZES.get(resolution.lower())
    if rows is None:
        raise InputError(
            f"resolution must be one of {', '.join(SIZES)}, got {resolution!r}"
            f"{did_you_mean(resolution, SIZES)}"
        )
    wanted = DEFAULT_ASPECT if aspect is None else f"{aspect[0]}:{aspect[1]}"
    ratio = _ratio(wanted)
    for name, size in zip(ASPECTS, rows, strict=True):
        if _ratio(name) == ratio:
            return size
    closest = min(ASPECTS, key=lambda name: abs(_ratio(name) - ratio))
    raise InputError(
        f"aspect (width:height) must be one of {', '.join(ASPECTS)}, got {wanted}; "
        f"the nearest is {closest}"
    )


def _ratio(aspect: str) -> float:
    width, height = aspect.split(":")
    return int(width) / int(height)
