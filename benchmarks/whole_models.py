"""Models of `whole.py`: what writes each with random weights, and what a user of diffusers runs.

Open-Sora has no diffusers pipeline, and its own code needs packages that no CPU has: there the base
is ours without a fast path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

START = """
import sys
import av
import numpy as np
import torch
from PIL import Image
import diffusers

folder, device, dtype, compiled, output, height, width, frames, steps = sys.argv[1:]
height, width, frames, steps = int(height), int(width), int(frames), int(steps)
"""

WAN = """
pipe = diffusers.WanPipeline.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
if compiled == "True":
    pipe.transformer.compile_repeated_blocks()
video = pipe(
    "a red ball", height=height, width=width, num_frames=frames, num_inference_steps=steps,
    generator=torch.Generator().manual_seed(1),
).frames[0]
"""

SVD = """
pipe = diffusers.StableVideoDiffusionPipeline.from_pretrained(
    folder, torch_dtype=getattr(torch, dtype)
).to(device)
if compiled == "True":
    pipe.unet.compile()
video = pipe(
    Image.open(folder + "/../picture.png"), height=height, width=width, num_frames=frames,
    num_inference_steps=steps, decode_chunk_size=frames, output_type="np",
    generator=torch.Generator().manual_seed(1),
).frames[0]
"""

WRITE = """
with av.open(output, "w") as file:
    stream = file.add_stream("libx264", rate=16)
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    for frame in (video * 255).round().astype(np.uint8):
        file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
    file.mux(stream.encode(None))
"""


@dataclass(frozen=True)
class Model:
    """A model with its sizes.

    Attributes:
        title: describes it, from the width of its denoiser and its layers.
        write: writes it into the folder ``model`` of a place, and its input beside that.
        script: what a user of diffusers writes between `START` and `WRITE`: it makes the frames;
            empty without such a pipeline.
        own: arguments of ours for the input, from the place.
        on_cpu, on_card: sizes, by the names of `whole.py`'s options.
    """

    title: Callable[[int, int], str]
    write: Callable[[Path, int, int], None]
    script: str
    own: Callable[[Path], list[str]]
    on_cpu: Mapping[str, int]
    on_card: Mapping[str, int]


def write_wan(place: Path, heads: int, layers: int) -> None:
    """Wan 2.1: its transformer as wide as asked, a small text encoder and autoencoder."""
    import torch
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    words = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", "a", "red"))}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = UMT5Config(
        vocab_size=16, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    WanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=bare, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        text_encoder=UMT5EncoderModel(encoder),
        transformer=WanTransformer3DModel(
            num_attention_heads=heads, num_layers=layers, ffn_dim=heads * 128 * 4, text_dim=64
        ),
        vae=AutoencoderKLWan(base_dim=16, num_res_blocks=1),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    ).save_pretrained(place / "model")


def write_svd(place: Path, width: int, layers: int) -> None:
    """Stable Video Diffusion: UNet and decoder with a part of their channels, a small CLIP."""
    import torch
    from diffusers import (
        AutoencoderKLTemporalDecoder,
        EulerDiscreteScheduler,
        StableVideoDiffusionPipeline,
        UNetSpatioTemporalConditionModel,
    )
    from PIL import Image
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    widths = (width, 2 * width, 4 * width, 4 * width)
    StableVideoDiffusionPipeline(
        vae=AutoencoderKLTemporalDecoder(
            block_out_channels=widths, latent_channels=4, layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4,
        ),
        image_encoder=CLIPVisionModelWithProjection(
            CLIPVisionConfig(hidden_size=64, projection_dim=1024, num_hidden_layers=2,
                             num_attention_heads=4, image_size=224, intermediate_size=64)
        ),
        unet=UNetSpatioTemporalConditionModel(
            block_out_channels=widths, layers_per_block=layers,
            num_attention_heads=tuple(max(1, each // 64) for each in widths),
        ),
        # As the released one, beyond what are defaults.
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", sigma_max=700.0,
            sigma_min=0.002, prediction_type="v_prediction", timestep_spacing="leading",
            timestep_type="continuous", use_karras_sigmas=True, steps_offset=1,
        ),
        feature_extractor=CLIPImageProcessor(crop_size=224, size=224),
    ).save_pretrained(place / "model")  # fmt: skip
    Image.radial_gradient("L").convert("RGB").save(place / "picture.png")


def write_opensora(place: Path, width: int, layers: int) -> None:
    """Open-Sora 1.2: its denoiser as asked, a decoder a quarter as wide as released, a small T5."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from helpers.tiny_checkpoints import opensora

    spatial = {"block_out_channels": [32, 64, 128, 128], "layers_per_block": 2}
    temporal = {"filters": 32, "num_res_blocks": 4, "channel_multipliers": [1, 2, 2, 4]}
    opensora.opensora_1_2(
        place / "model", hidden_size=width, num_heads=width // 72, depth=layers,
        vae={"spatial": {**opensora.AUTOENCODER, **spatial, "norm_num_groups": 32},
             "temporal": {**temporal, "num_groups": 32}},
    )  # fmt: skip


MODELS = {
    "wan": Model(
        lambda heads, layers: f"Wan 2.1, random weights, {heads} heads of 128, {layers} blocks",
        write_wan,
        WAN,
        lambda place: ["--prompt", "a red ball"],
        {"width_of_model": 4, "layers": 6, "height": 128, "width": 192, "frames": 17, "steps": 8},
        {"width_of_model": 12, "layers": 10, "height": 480, "width": 832, "frames": 17,
         "steps": 10},
    ),
    "svd": Model(
        lambda width, layers: (
            f"Stable Video Diffusion, random weights, {width} to {4 * width} channels in UNet and "
            f"decoder, {layers} layers a level"
        ),
        write_svd,
        SVD,
        lambda place: ["--image", str(place / "picture.png"), "--fit", "stretch",
                       "--decode-chunk-size", "14"],
        {"width_of_model": 64, "layers": 2, "height": 128, "width": 192, "frames": 14,
         "steps": 15},
        {"width_of_model": 320, "layers": 2, "height": 576, "width": 1024, "frames": 14,
         "steps": 15},
    ),
    "opensora": Model(
        lambda width, layers: (
            f"Open-Sora 1.2, random weights, width {width}, {layers}+{layers} blocks, a decoder of "
            "a quarter of its channels"
        ),
        write_opensora,
        "",
        lambda place: ["--prompt", "a red circle"],
        {"width_of_model": 576, "layers": 4, "height": 192, "width": 256, "frames": 17,
         "steps": 8},
        {"width_of_model": 1152, "layers": 28, "height": 480, "width": 864, "frames": 51,
         "steps": 10},
    ),
}  # fmt: skip
