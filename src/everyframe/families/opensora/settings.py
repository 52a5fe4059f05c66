"""Resolve a request against one Open-Sora model: size, length, steps and family options.

Pure functions of the request and the model's sizes; no torch, no files. An impossible value raises
`InputError` with the values that are possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.opensora.options import OpenSoraOptions
from everyframe.families.opensora.prompts import loses_all, lost
from everyframe.families.opensora.vae_config import ImageVAEConfig, VideoVAEConfig
from everyframe.runtime.request_checks import (
    check_amount,
    check_latents,
    check_prompt,
    check_size,
    frames_in,
    in_pieces,
    shorter_lengths,
    smaller_sizes,
    smaller_videos,
)

#: Aspect ratios (width:height) from wide to tall, in the order of the rows below.
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

    Raises `InputError` for a name or ratio that is not in 1.2's table.
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


#: Frames of one piece of 1.2's autoencoder; its weights were trained on multiples of it.
PIECE = 17
#: Training lengths of 1.2; quality beyond them is not known (upstream #641, #696).
_TRAINED_FRAMES = (51, 408)
#: The fps input of 1.2 for a single image (upstream `IMG_FPS`).
PICTURE_FPS = 120.0

_UPSTREAM_DEFAULTS: dict[str, dict[str, Any]] = {
    "1.0": {
        "num_frames": 16,
        "fps": 8.0,
        "num_inference_steps": 100,
        "guidance_scale": 7.0,
    },
    "1.2": {
        "num_frames": 51,
        "fps": 24.0,
        "num_inference_steps": 30,
        "guidance_scale": 7.0,
        "resolution": "240p",
        "aesthetic": 6.5,
    },
}


_RELEASED_ONLY = ("resolution", "aesthetic", "use_timestep_transform")


@dataclass(frozen=True)
class OpenSoraFacts:
    """Facts of a model that resolving a request needs.

    Attributes:
        version: "1.0" or "1.2".
        title: display name.
        vae: config of the autoencoder.
        patch: patch size of the denoiser.
        defaults: from the checkpoint's own `everyframe.json`, if it has one.
        has_scores: whether training captions contained aesthetic and motion scores.
        square: side in pixels that 1.0 was trained at.
    """

    version: str
    title: str
    vae: ImageVAEConfig | VideoVAEConfig
    patch: tuple[int, int, int]
    defaults: Mapping[str, Any]
    has_scores: bool
    square: int | None = None

    @property
    def size_step(self) -> int:
        """Height and width must be a multiple of this many pixels.

        1.2 pads its latents to the patch and crops them again; 1.0 cannot.
        """
        patch = self.patch[1] if self.version == "1.0" else 1
        return self.vae.spatial_factor * patch

    def default(self, name: str) -> Any:
        """Default of the checkpoint, else upstream's default for the version."""
        # A checkpoint that states its own defaults is none of upstream's: what upstream's sizes
        # and captions were says nothing of it.
        if self.defaults and name in _RELEASED_ONLY:
            return self.defaults.get(name)
        return self.defaults.get(name, _UPSTREAM_DEFAULTS[self.version].get(name))


def resolve_settings(
    facts: OpenSoraFacts, request: Request, options: OpenSoraOptions, seed: int
) -> tuple[Settings, tuple[str, ...]]:
    """Resolve every value of the request; return settings, and notes for the user."""
    if request.prompt is None:
        raise InputError(f"{facts.title} draws what a prompt says; give one")
    check_prompt(request.prompt)
    for prompt in (request.prompt, request.negative_prompt):
        if prompt is not None and loses_all(prompt):
            raise InputError(lost(prompt))
    notes: list[str] = []
    _check_given_frames(facts, request)
    nominal = _nominal_size(facts, request)
    height, width = _fitted_size(facts, request, nominal, notes)
    fps = request.fps if request.fps is not None else float(facts.default("fps"))
    num_frames = _num_frames(facts, request, fps, notes)
    guidance = _or_default(request.guidance_scale, facts.default("guidance_scale"))
    if request.negative_prompt is not None and guidance == 1:
        raise InputError("negative_prompt has no effect with guidance_scale 1; raise the scale")
    steps = _or_default(request.num_inference_steps, facts.default("num_inference_steps"))
    if facts.version == "1.0" and steps > 1000:
        raise InputError(f"num_inference_steps must be at most 1000 for Open-Sora 1.0, got {steps}")
    check_amount(num_frames, height, width)
    settings = Settings(
        prompt=request.prompt.strip(),
        negative_prompt=request.negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        fps=fps,
        num_inference_steps=int(steps),
        guidance_scale=float(guidance),
        seed=seed,
        num_videos=request.num_videos,
        chain=request.chain,
        edit_strength=request.edit_strength or 0.0,
        given_frames=tuple(
            name for name in ("image", "last_image", "extend") if getattr(request, name) is not None
        ),
        nominal_size=None if nominal == (height, width) else nominal,
        options=_family_settings(facts, options),
    )
    _check_room(facts, settings)
    size = facts.vae.latent_size(settings.num_frames, settings.height, settings.width)
    check_latents(
        request.latents,
        (1, facts.vae.latent_channels, *size),
        f"for {settings.num_frames} frames of {settings.width}x{settings.height}",
    )
    return settings, tuple(notes)


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_given_frames(facts: OpenSoraFacts, request: Request) -> None:
    if facts.version == "1.0":
        for name in ("image", "last_image", "extend"):
            if getattr(request, name) is not None:
                raise InputError(
                    f"{facts.title} can't take given frames ({name}); Open-Sora 1.2 can"
                )
        if request.chain > 1:
            raise InputError(f"{facts.title} can't continue a clip (chain); Open-Sora 1.2 can")
    if request.edit_strength is not None and not request.has_given_frames() and request.chain == 1:
        raise InputError(
            "edit_strength has no effect without given frames; "
            "give image, last_image, extend or chain"
        )


def _nominal_size(facts: OpenSoraFacts, request: Request) -> tuple[int, int]:
    asked = request.asked_size()
    if asked is not None:
        return asked
    if request.resolution is not None:
        if facts.version == "1.0":
            raise InputError(
                f"{facts.title} has no named resolutions, got {request.resolution!r}; "
                f"it was trained at {facts.square}x{facts.square}"
            )
        return named_size(request.resolution, request.asked_aspect())
    if facts.default("resolution"):
        return named_size(facts.default("resolution"), None)
    side = facts.square or 256
    return int(facts.default("height") or side), int(facts.default("width") or side)


def _fitted_size(
    facts: OpenSoraFacts, request: Request, nominal: tuple[int, int], notes: list[str]
) -> tuple[int, int]:
    """Fit the size to whole latents: an error for a numeric size, a note for a named one."""
    step = facts.size_step
    fitted = (nominal[0] // step * step, nominal[1] // step * step)
    if fitted == nominal and min(fitted) > 0:
        return fitted
    if request.asked_size() is None:
        notes.append(
            f"{nominal[1]}x{nominal[0]} becomes {fitted[1]}x{fitted[0]}: "
            f"the autoencoder works in steps of {step} pixels"
        )
        return fitted
    check_size(*nominal, step)
    raise AssertionError("a size that does not fit has a side that does not")


def _num_frames(facts: OpenSoraFacts, request: Request, fps: float, notes: list[str]) -> int:
    if request.num_frames is not None:
        frames = request.num_frames
    elif request.seconds is not None:
        frames = frames_in(request.seconds, fps)
        if isinstance(facts.vae, VideoVAEConfig):
            whole = max(1, round(frames / PIECE)) * PIECE
            if whole != frames:
                notes.append(in_pieces(request.seconds, fps, whole, PIECE))
            frames = whole
    else:
        frames = int(facts.default("num_frames"))
    low, high = _TRAINED_FRAMES
    if facts.version == "1.2" and not facts.defaults and frames != 1 and not low <= frames <= high:
        notes.append(
            f"Open-Sora 1.2 was trained on 1 frame and on {low} to {high}, not on {frames}"
        )
    return frames


def _family_settings(facts: OpenSoraFacts, options: OpenSoraOptions) -> tuple[tuple[str, Any], ...]:
    scores = {
        "aesthetic": options.aesthetic,
        "motion_score": options.motion_score,
        "camera_motion": options.camera_motion,
    }
    if not facts.has_scores:
        for name, value in scores.items():
            if value is not None:
                raise InputError(
                    f"{name} has no effect on {facts.title}; it is for Open-Sora 1.2's weights"
                )
    elif "aesthetic" not in options.model_fields_set:
        scores["aesthetic"] = facts.default("aesthetic")
    return (
        *scores.items(),
        ("truncate_prompt", options.truncate_prompt),
    )


def known_frames(facts: OpenSoraFacts, settings: Settings) -> tuple[int, int]:
    """Number of frames that a clip continues from, and of their latent frames.

    A whole piece if the clip is longer than one, as upstream does; else one image.
    """
    if facts.vae.latent_frames(settings.num_frames) > facts.vae.latent_frames(PIECE):
        return PIECE, facts.vae.latent_frames(PIECE)
    return 1, 1


def _check_room(facts: OpenSoraFacts, settings: Settings) -> None:
    """Check that conditioning frames leave frames to generate."""
    if not settings.given_frames and settings.chain == 1:
        return
    latent_frames = facts.vae.latent_frames(settings.num_frames)
    goes_on = "extend" in settings.given_frames or settings.chain > 1
    taken = known_frames(facts, settings)[1] if goes_on else "image" in settings.given_frames
    taken += "last_image" in settings.given_frames
    if latent_frames <= taken and settings.edit_strength == 0:
        enough = PIECE if settings.num_frames < PIECE else 2 * PIECE
        raise InputError(
            f"{settings.num_frames} frames are {latent_frames} latent frames, and the given ones "
            f"take {taken} of them; ask for more frames, for example {enough}"
        )


def smaller_settings(facts: OpenSoraFacts, settings: Settings) -> Iterator[Settings]:
    """Yield the same video shorter, smaller or both, most pixels first."""
    step = facts.size_step
    sides = smaller_sizes(settings.height, settings.width, step, 8 * step)
    for each in smaller_videos(settings, shorter_lengths(settings.num_frames, PIECE), sides):
        is_as_asked = (each.height, each.width) == sides[0]
        yield each if is_as_asked else replace(each, nominal_size=None)
