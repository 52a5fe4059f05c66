"""Cases of the contract tests of all families (`tests/families/test_contract.py`).

Read next: `tiny_checkpoints/families.py` for the checkpoints, `references/` for the reference runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from helpers.pictures import smooth_picture
from helpers.references import inpaint, opensora, opensora2, stepvideo, svd

Array = np.ndarray[Any, Any]

#: So many words that every text encoder of ours cuts them.
LONG_PROMPT = "a red circle on a blue background " * 60


@dataclass(frozen=True)
class Reference:
    """The same frames by other means.

    Attributes:
        request: what is asked of us, without the number of steps.
        frames: ``frames(folder, steps)``, float (T, H, W, 3).
        steps: numbers of steps: the fewest, and more.
        close: largest difference of a frame, and why.
    """

    request: Mapping[str, Any]
    frames: Callable[[Path, int], Array]
    steps: tuple[int, int]
    close: float


@dataclass(frozen=True)
class FamilyCase:
    """One family, or a version of it.

    Attributes:
        files: safetensors of each component below the checkpoint; each is broken once.
        stages: its stages in their order, each with the components that it loads.
        read_whole: options with which a run's text is as long as a dry run takes it.
        float32_in_fp16: components whose checkpoint allows no float16, so they stay in float32.
    """

    files: tuple[str, ...]
    stages: tuple[tuple[str, tuple[str, ...]], ...]
    reference: Reference
    read_whole: Mapping[str, Any] = field(default_factory=dict)
    float32_in_fp16: frozenset[str] = frozenset()


def _opensora_1_2(folder: Path, steps: int) -> Array:
    return opensora.frames_1_2(folder, opensora.start_noise(), steps=steps)[1]


def _opensora_1_0(folder: Path, steps: int) -> Array:
    (weights,) = folder.glob("*.pth")
    return opensora.frames_1_0(weights, seed=11, steps=steps)


def _stepvideo(folder: Path, steps: int) -> Array:
    return stepvideo.frames_of(folder, steps=steps)


_PICTURE_2 = smooth_picture(opensora2.SIZES["height"], opensora2.SIZES["width"])


def _opensora2(folder: Path, steps: int) -> Array:
    return opensora2.frames_of(folder, steps=steps, picture=_PICTURE_2)


def _opensora2_dcae(folder: Path, steps: int) -> Array:
    return opensora2.deep_frames_of(folder, steps=steps)


_SVD = {**svd.SIZES, "latents": svd.start_noise(svd.SIZES), "seed": 7}
_SVD_PICTURE = smooth_picture(svd.SIZES["height"], svd.SIZES["width"])


def _svd(folder: Path, steps: int) -> Array:
    pipe = svd.load_pipeline(folder)
    return svd.frames_of(pipe, _SVD_PICTURE, **{**_SVD, "num_inference_steps": steps})


_INPAINT = {
    "source": smooth_picture(32, 48), "mask": inpaint.soft_mask(32, 48),
    "control": smooth_picture(32, 48, seed=1),
}  # fmt: skip
_INPAINT_NOISE = inpaint.start_noise(32, 48)


def _inpaint(folder: Path, steps: int) -> Array:
    pipe = inpaint.load_pipeline(folder)
    return inpaint.frames_of(pipe, **_INPAINT, latents=_INPAINT_NOISE, num_inference_steps=steps)


CASES: Mapping[str, FamilyCase] = {
    "opensora-1.0": FamilyCase(
        files=("text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
        stages=(
            ("text", ("text_encoder",)),
            ("denoise", ("denoiser",)), ("decode", ("vae",)),
        ),
        reference=Reference(
            {"prompt": opensora.PROMPT, "size": "48x32", "num_frames": 3, "seed": 11},
            _opensora_1_0,
            steps=(2, 5),
            # Latents grow to hundreds with random weights, and the decoder's norms bring them back:
            # relative rounding of float32 stays.
            close=1e-3,
        ),
        read_whole={"prompt": LONG_PROMPT, "truncate_prompt": True},
    ),
    "opensora-1.2": FamilyCase(
        files=(
            "model.safetensors", "text_encoder/model.safetensors", "vae/model.safetensors"
        ),
        stages=(
            ("text", ("text_encoder",)),
            ("denoise", ("denoiser",)), ("decode", ("vae",)),
        ),
        reference=Reference(
            {
                **opensora.SIZES, "prompt": opensora.PROMPT, "seed": 5,
                "latents": opensora.start_noise(),
            },
            _opensora_1_2,
            steps=(1, 4),
            # Float32 sums in another order (one batch or two) over 4 steps; 2e-6 measured.
            close=2e-5,
        ),
        read_whole={"prompt": LONG_PROMPT, "truncate_prompt": True},
    ),
    "opensora2": FamilyCase(
        files=("Open_Sora_v2.safetensors", "hunyuan_vae.safetensors"),
        stages=(
            ("text", ("text_encoder",)), ("clip text", ("clip",)), ("given frames", ("vae",)),
            ("denoise", ("denoiser",)), ("decode", ("vae",)),
        ),
        reference=Reference(
            {**opensora2.SIZES, "prompt": opensora2.PROMPT, "image": _PICTURE_2, "seed": 5},
            _opensora2,
            # With steps whose guidance is off: from the eleventh on every second one.
            steps=(1, 13),
            close=1e-4,
        ),
    ),
    "opensora2-dcae": FamilyCase(
        files=("Open_Sora_v2_Video_DC_AE.safetensors", "F32T4C128_AE.safetensors"),
        stages=(
            ("text", ("text_encoder",)), ("clip text", ("clip",)), ("denoise", ("denoiser",)),
            ("decode", ("vae",)),
        ),
        reference=Reference(
            {"prompt": opensora2.PROMPT, "size": "64x32", "num_frames": 8, "seed": 5},
            _opensora2_dcae,
            steps=(1, 13),
            close=1e-4,
        ),
    ),
    "svd": FamilyCase(
        files=(
            "image_encoder/model.safetensors",
            "unet/diffusion_pytorch_model.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
        ),
        stages=(
            ("image", ("image_encoder",)), ("given frames", ("vae",)),
            ("denoise", ("unet",)), ("decode", ("vae",)),
        ),
        float32_in_fp16=frozenset({"vae"}),
        reference=Reference(
            {**_SVD, "image": _SVD_PICTURE},
            _svd,
            steps=(1, 3),
            # One step from sigma 700 to 0 enlarges a last bit by 700; 4e-5 measured.
            close=5e-5,
        ),
    ),
    "inpaint": FamilyCase(
        files=(
            "text_encoder/model.safetensors",
            "unet/diffusion_pytorch_model.safetensors",
            "vae/diffusion_pytorch_model.safetensors",
            "controlnet/diffusion_pytorch_model.safetensors",
        ),
        stages=(
            ("text", ("text_encoder",)), ("given frames", ("vae",)),
            ("denoise", ("controlnet", "unet")), ("decode", ("vae",)),
        ),
        float32_in_fp16=frozenset({"vae"}),
        reference=Reference(
            {
                **_INPAINT, "prompt": inpaint.PROMPT, "seed": 7, "unblended": True,
                "latents": _INPAINT_NOISE,
            },
            _inpaint,
            steps=(1, 3),
            # Residuals of zero that are not added; see `families/inpaint/test_stages.py`.
            close=5e-5,
        ),
    ),
    "stepvideo": FamilyCase(
        files=(
            "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
            "vae/vae_v2.safetensors",
        ),
        stages=(
            ("text", ("step_llm",)), ("clip text", ("clip",)),
            ("denoise", ("denoiser",)), ("decode", ("vae",)),
        ),
        reference=Reference(
            {**stepvideo.SIZES, "prompt": stepvideo.PROMPT, "seed": 5},
            _stepvideo,
            steps=(1, 3),
            # Float32 sums in another order (one batch or two) over 3 steps and a decoder; 4e-6
            # measured.
            close=4e-5,
        ),
        read_whole={"prompt": LONG_PROMPT, "truncate_prompt": True},
    ),
}  # fmt: skip
