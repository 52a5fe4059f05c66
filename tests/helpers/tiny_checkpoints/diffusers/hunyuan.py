"""Tiny checkpoints of HunyuanVideo, Kandinsky 5 and other pipelines with its autoencoder."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from helpers.tiny_checkpoints.diffusers.cases import Still, case
from helpers.tiny_checkpoints.pipeline_components import (
    VOCABULARY,
    clip,
    flow,
    hunyuan15_parts,
    hunyuan_parts,
    made,
    tokenizer,
)
from helpers.tiny_checkpoints.pipelines import SHORT


def sees(width: int = 12) -> dict[str, Any]:
    """What encodes a picture for attention, and what prepares it."""
    config = transformers.SiglipVisionConfig(
        hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=8, patch_size=4,
    )  # fmt: skip
    return {
        "image_encoder": made(transformers.SiglipVisionModel(config)),
        "feature_extractor": transformers.SiglipImageProcessorPil(size={"height": 8, "width": 8}),
    }


@case("HunyuanVideoPipeline", size="16x16", num_frames=5, option=SHORT)
def hunyuan() -> Any:
    """HunyuanVideo of a text."""
    return diffusers.HunyuanVideoPipeline(**hunyuan_parts())


@case(
    "HunyuanSkyreelsImageToVideoPipeline", size="16x16", num_frames=5, option=SHORT, image=Still()
)
def skyreels() -> Any:
    """SkyReels V1: HunyuanVideo with a picture beside the noise."""
    return diffusers.HunyuanSkyreelsImageToVideoPipeline(
        **hunyuan_parts(in_channels=8, guidance_embeds=False)
    )


#: Ends the name of who speaks; the pipeline looks for it.
_END = "<|end_header_id|>"


@case(
    "HunyuanVideoImageToVideoPipeline",
    size="16x16", num_frames=9, image=Still(),
    option={
        "max_sequence_length": 32,
        "prompt_template": {
            "template": f"{_END}<image>.{_END}{{}}{_END}done", "crop_start": 4,
            "image_emb_start": 1, "image_emb_end": 5, "image_emb_len": 4,
        },
    },
)  # fmt: skip
def hunyuan_of_a_picture() -> Any:
    """HunyuanVideo of a picture, which a language model sees."""
    llava = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(
                hidden_size=16, intermediate_size=37, num_attention_heads=4, num_hidden_layers=4,
                vocab_size=VOCABULARY + 1, pad_token_id=0,
            ),
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=8, intermediate_size=37, projection_dim=16, num_attention_heads=2,
                num_hidden_layers=2, image_size=8, patch_size=4,
            ),
            pad_token_id=0, image_token_index=4, image_seq_length=4,
        )
    )  # fmt: skip
    parts = hunyuan_parts(in_channels=2 * 4 + 1, image_condition_type="latent_concat")
    parts["text_encoder"] = made(llava)
    parts["tokenizer"].add_special_tokens({"additional_special_tokens": [_END, "<image>"]})
    return diffusers.HunyuanVideoImageToVideoPipeline(
        **parts,
        image_processor=transformers.CLIPImageProcessorPil(
            crop_size={"height": 8, "width": 8}, size={"shortest_edge": 8}
        ),
    )


@case(
    "HunyuanVideoFramepackPipeline",
    size="32x32", num_frames=13, made=4, image=Still(),
    option={**SHORT, "latent_window_size": 3},
)  # fmt: skip
def framepack() -> Any:
    """FramePack: section after section, with the older ones packed smaller."""
    parts = hunyuan_parts(
        diffusers.HunyuanVideoFramepackTransformer3DModel,
        has_image_proj=True, image_proj_dim=12, has_clean_x_embedder=True, patch_size=2,
    )  # fmt: skip
    return diffusers.HunyuanVideoFramepackPipeline(**parts, **sees())


@case("HunyuanVideo15Pipeline", size="16x16", num_frames=5)
def hunyuan15() -> Any:
    """HunyuanVideo-1.5 of a text."""
    return diffusers.HunyuanVideo15Pipeline(**hunyuan15_parts())


@case("HunyuanVideo15ImageToVideoPipeline", num_frames=5, image=Still())
def hunyuan15_of_a_picture() -> Any:
    """HunyuanVideo-1.5 of a picture, which sets the size."""
    return diffusers.HunyuanVideo15ImageToVideoPipeline(**hunyuan15_parts("i2v"), **sees())


def qwen_vl() -> Any:
    """A language model that sees, of Qwen 2.5's kind."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": 16, "fullatt_block_indexes": [0],
        },
        image_token_id=4, video_token_id=5, vision_start_token_id=6, vision_end_token_id=7,
    )  # fmt: skip
    return made(transformers.Qwen2_5_VLForConditionalGeneration(config))


def _kandinsky5(cls: Any, **more: Any) -> Any:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, out_visual_dim=4,
        patch_size=(1, 2, 2), model_dim=16, ff_dim=32, num_text_blocks=1, num_visual_blocks=2,
        axes_dims=(2, 2, 4), **more,
    )  # fmt: skip
    return cls(
        transformer=made(transformer), vae=hunyuan_parts()["vae"], text_encoder=qwen_vl(),
        tokenizer=tokenizer(1024), text_encoder_2=clip(8), tokenizer_2=tokenizer(77),
        scheduler=flow(),
    )  # fmt: skip


@case("Kandinsky5T2VPipeline", size="16x16", num_frames=5, option=SHORT)
def kandinsky5() -> Any:
    """Kandinsky 5 of a text."""
    return _kandinsky5(diffusers.Kandinsky5T2VPipeline)


@case("Kandinsky5I2VPipeline", size="16x16", num_frames=17, option=SHORT, image=Still())
def kandinsky5_of_a_picture() -> Any:
    """Kandinsky 5 of a picture."""
    return _kandinsky5(diffusers.Kandinsky5I2VPipeline, visual_cond=True)
