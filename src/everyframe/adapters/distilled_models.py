"""Step-distilled models and LoRAs, recognised by file name or header, as data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from everyframe.adapters.gguf_header import read_gguf_header
from everyframe.checkpoints.safetensors_header import read_header
from everyframe.core.errors import CheckpointError
from everyframe.runtime.sampling_preset import SamplingPreset

_WAN = ("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel",
        "SkyReelsV2Transformer3DModel")  # fmt: skip
_HUNYUAN = ("HunyuanVideoTransformer3DModel",)
_LTX_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)

#: The first that fits is taken.
PRESETS: tuple[SamplingPreset, ...] = (
    SamplingPreset(
        "CausVid", _WAN, r"caus_?vid", 9, 1.0,
        "https://lightx2v-en.readthedocs.io/en/latest/method_tutorials/autoregressive_distill.html",
        sigmas=(0.999, 0.934, 0.862, 0.756, 0.603, 0.410, 0.250, 0.140, 0.074),
    ),
    SamplingPreset(
        "AccVideo", _WAN, r"acc_?vid", 10, 1.0, "https://github.com/aejion/AccVideo",
    ),
    SamplingPreset(
        "lightx2v's step and guidance distillation", _WAN,
        r"lightx2v|lightning|self_?forcing|(step|cfg).*distill", 4, 1.0,
        "https://github.com/ModelTC/LightX2V/blob/main/docs/EN/source/method_tutorials/"
        "step_distill.md", shift=5.0,
    ),
    SamplingPreset(
        "AccVideo", _HUNYUAN, r"acc_?vid", 5, None, "https://github.com/aejion/AccVideo",
    ),
    SamplingPreset(
        "FastHunyuan", _HUNYUAN, r"fast_?(hunyuan|video)", 6, 6.0,
        "https://huggingface.co/FastVideo/FastHunyuan", shift=17.0,
    ),
    SamplingPreset(
        "HunyuanVideo 1.5's step distillation", ("HunyuanVideo15Transformer3DModel",),
        r"step_?distill", 4, 1.0, "https://github.com/Tencent-Hunyuan/HunyuanVideo-1.5", shift=5.0,
    ),
    SamplingPreset(
        "LTX-Video's distillation", ("LTXVideoTransformer3DModel",), r"distill", 8, 1.0,
        "https://github.com/Lightricks/LTX-Video/blob/main/configs/ltxv-13b-0.9.8-distilled.yaml",
        sigmas=(1.0, 0.9937, 0.9875, 0.9812, 0.975, 0.9094, 0.725, 0.4219),
    ),
    SamplingPreset(
        "AnimateLCM-SVD", ("UNetSpatioTemporalConditionModel",), r"animate_?lcm", 4, 1.0,
        "https://github.com/G-U-N/AnimateLCM/blob/main/animatelcm_svd/batch_inference.py",
    ),
    SamplingPreset(
        "LTX-2's distillation", ("LTX2VideoTransformer3DModel",), r"distill", 8, 1.0,
        "https://github.com/huggingface/diffusers/blob/main/src/diffusers/pipelines/ltx2/utils.py",
        sigmas=_LTX_SIGMAS,
    ),
)  # fmt: skip


#: Keys of a file's header under which trainers and converters write what it is.
_TITLES = ("modelspec.title", "ss_output_name", "general.name", "title", "name")


def titles_in(path: Path) -> tuple[str, ...]:
    """Titles in the header of a safetensors or GGUF file; none for other files.

    Tensors don't help: those of a distillation have the names, shapes and ranks of any adapter.
    """
    if path.suffix not in (".safetensors", ".gguf") or not path.is_file():
        return ()
    try:
        header = read_gguf_header(path) if path.suffix == ".gguf" else read_header(path)
    except CheckpointError:
        return ()  # named where it is read
    return tuple(str(header.metadata[key]) for key in _TITLES if header.metadata.get(key))


def find_preset(
    files: Mapping[str, Sequence[str]] | Iterable[str], classes: Sequence[str]
) -> tuple[SamplingPreset | None, str]:
    """Preset of the first known file, and the file's name; None if no file is known.

    A file is recognised by its name, else by one of its titles (`titles_in`).
    """
    titles = files if isinstance(files, Mapping) else dict.fromkeys(files, ())
    for file, more in titles.items():
        for text in (file, *more):
            name = re.sub(r"[-. ]", "_", text.lower())
            for preset in PRESETS:
                if re.search(preset.file, name) and set(preset.classes) & set(classes):
                    return preset, file
    return None, ""
