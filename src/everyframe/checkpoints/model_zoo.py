"""Models with a short name: repositories, files and sizes. Data only.

A model that is not listed can still be given as a folder, a file or a hub id. `everyframe models`
lists this table, and misspelt names are compared with it. `hub_part` defines the types.
"""

from __future__ import annotations

from collections.abc import Mapping

from everyframe.checkpoints.hub_part import HubPart, KnownModel

_CONFIG = ("config.json",)

# The repository holds the encoder half only, as two pickled shards in float32.
T5_XXL = HubPart(
    role="text_encoder",
    repo_id="DeepFloyd/t5-v1_1-xxl",
    needs=(_CONFIG, ("pytorch_model*.bin",), ("spiece.model",)),
    extras=("pytorch_model.bin.index.json", "tokenizer_config.json", "special_tokens_map.json"),
    num_parameters=4_762_310_656,
)
SD_VAE_EMA = HubPart(
    role="vae",
    repo_id="stabilityai/sd-vae-ft-ema",
    needs=(_CONFIG, ("diffusion_pytorch_model.safetensors",)),
    num_parameters=83_653_863,
)


def _svd(name: str, repo: str, title: str, aliases: tuple[str, ...], note: str) -> KnownModel:
    """Diffusers folder of an SVD model: denoiser with the pipeline's files, and two encoders."""

    def files(folder: str, weights: str) -> tuple[tuple[str, ...], ...]:
        return ((f"{folder}/config.json",), (f"{folder}/{weights}.safetensors",))

    repo_id = f"stabilityai/{repo}"
    diffusers = "diffusion_pytorch_model"
    index = (("model_index.json",), ("scheduler/scheduler_config.json",))
    extractor = (("feature_extractor/preprocessor_config.json",),)
    return KnownModel(
        name=name,
        family="svd",
        title=title,
        licence="Stability AI's own; see the model's card",
        parts=(
            HubPart("denoiser", repo_id, (*index, *files("unet", diffusers)), (), 1_524_623_082),
            HubPart("vae", repo_id, files("vae", diffusers), (), 97_742_847),
            HubPart(
                "image_encoder",
                repo_id,
                (*extractor, *files("image_encoder", "model")),
                (),
                632_076_800,
            ),
        ),
        aliases=aliases,
        note=note,
    )


#: ControlNets by their usual names: version 1.1, for Stable Diffusion 1.5.
CONTROLNETS: Mapping[str, str] = {
    name: f"lllyasviel/control_v11{version}_sd15_{name}"
    for name, version in (
        ("inpaint", "p"), ("canny", "p"), ("depth", "f1p"), ("lineart", "p"), ("mlsd", "p"),
        ("normalbae", "p"), ("openpose", "p"), ("scribble", "p"), ("seg", "p"), ("softedge", "p"),
    )
}  # fmt: skip


def controlnet_part(repo_id: str) -> HubPart:
    """Repository of a ControlNet in diffusers' format; its size is known if it is listed."""
    is_listed = repo_id in CONTROLNETS.values()
    return HubPart(
        role="controlnet",
        repo_id=repo_id,
        needs=(_CONFIG, ("diffusion_pytorch_model.safetensors",)),
        num_parameters=361_279_120 if is_listed else None,
    )


def _inpaint(
    name: str, repo: str, title: str, num_parameters: int, aliases: tuple[str, ...]
) -> KnownModel:
    """Diffusers folder of Stable Diffusion 1.5, and the ControlNet for inpainting."""
    repo_id = f"stable-diffusion-v1-5/{repo}"
    unet, vae = (
        ((f"{part}/config.json",), (f"{part}/diffusion_pytorch_model.safetensors",))
        for part in ("unet", "vae")
    )
    index = (("model_index.json",), ("scheduler/scheduler_config.json",))
    text = (
        ("tokenizer/vocab.json",),
        ("tokenizer/merges.txt",),
        ("text_encoder/config.json",),
        ("text_encoder/model.safetensors",),
    )
    extras = ("tokenizer/*.json",)
    return KnownModel(
        name=name,
        family="inpaint",
        title=title,
        licence="CreativeML OpenRAIL-M",
        parts=(
            HubPart("denoiser", repo_id, (*index, *unet), (), num_parameters),
            HubPart("vae", repo_id, vae, (), 83_653_863),
            HubPart("text_encoder", repo_id, text, extras, 123_060_480),
            controlnet_part(CONTROLNETS["inpaint"]),
        ),
        aliases=aliases,
        note="repaints a part of a picture or video; another ControlNet by --controlnet",
    )


def _svd_image_decoder(name: str, repo: str, num_frames: int) -> KnownModel:
    """SVD release in one file only; its decoder handles each frame separately."""
    file = f"{name.replace('-', '_')}.safetensors"
    return KnownModel(
        name=name,
        family="svd",
        title=f"Stable Video Diffusion, {num_frames} frames of a picture, each decoded alone",
        licence="Stability AI's own; see the model's card",
        # The denoiser, CLIP with its text half, and the autoencoder twice.
        parts=(HubPart("model", f"stabilityai/{repo}", ((file,),), (), 2_375_700_000),),
        note="takes a picture and no prompt; one file",
    )


def _opensora_1_0(size: str) -> KnownModel:
    return KnownModel(
        name=f"opensora-1.0-16x{size}",
        family="opensora",
        title=f"Open-Sora 1.0, 16 frames of {size.replace('x', ' x ')}",
        licence="Apache-2.0 (denoiser), MIT (autoencoder), Apache-2.0 (text encoder)",
        parts=(
            HubPart(
                role="denoiser",
                repo_id="hpcai-tech/Open-Sora",
                needs=((f"OpenSora-v1-HQ-16x{size}.pth",),),
                num_parameters=759_600_000,  # to four digits; the report gives no more
            ),
            SD_VAE_EMA,
            T5_XXL,
        ),
        aliases=(f"16x{size}", f"OpenSora-v1-HQ-16x{size}.pth"),
        note="a pickle, read as tensors only; text of at most 120 tokens",
    )


_STEP_VIDEO = "stepfun-ai/stepvideo-t2v"


def _step_video_denoiser(repo_id: str) -> HubPart:
    """Step-Video denoiser: six bfloat16 shards in diffusers' format."""
    needs = (("transformer/config.json",), ("transformer/*.safetensors",))
    extras = ("transformer/*.index.json", "scheduler/scheduler_config.json", "model_index.json")
    return HubPart("denoiser", repo_id, needs, extras, 29_342_478_400, parameter_bytes=2)


#: Components that both variants share, from the base model's repository.
STEP_VIDEO_PARTS = (
    HubPart(
        "step_llm",
        _STEP_VIDEO,
        (
            ("step_llm/config.json",),
            ("step_llm/*.safetensors",),
            ("step_llm/step1_chat_tokenizer.model",),
        ),
        ("step_llm/*.index.json",),
        19_579_600_896,
        parameter_bytes=2,
    ),
    HubPart(
        "clip",
        _STEP_VIDEO,
        (
            ("hunyuan_clip/clip_text_encoder/config.json",),
            (
                "hunyuan_clip/clip_text_encoder/pytorch_model.safetensors",
                "hunyuan_clip/clip_text_encoder/pytorch_model.bin",
            ),
            ("hunyuan_clip/tokenizer/vocab.txt",),
        ),
        ("hunyuan_clip/tokenizer/*.json",),
        # As far as it is known; the file holds unused tensors too.
        350_986_240,
    ),
    HubPart("vae", _STEP_VIDEO, (("vae/vae_v2.safetensors",),), (), 498_818_819),
)


def _step_video(name: str, title: str, aliases: tuple[str, ...], note: str) -> KnownModel:
    return KnownModel(
        name=name,
        family="stepvideo",
        title=title,
        licence="MIT",
        parts=(_step_video_denoiser(f"stepfun-ai/{name}"), *STEP_VIDEO_PARTS),
        aliases=aliases,
        note=note,
    )


KNOWN: tuple[KnownModel, ...] = (
    KnownModel(
        name="shapes",
        family="opensora",
        title="the embedded model: coloured shapes that move",
        licence="Apache-2.0",
        embedded="checkpoints/shapes",
        note="ships with this package; nothing is fetched",
    ),
    KnownModel(
        name="opensora-1.2",
        family="opensora",
        title="Open-Sora 1.2, 144p to 720p, 2 s to 16 s",
        licence="Apache-2.0",
        parts=(
            HubPart(
                role="denoiser",
                repo_id="hpcai-tech/OpenSora-STDiT-v3",
                needs=(_CONFIG, ("*.safetensors",)),
                extras=("*.safetensors.index.json",),
                num_parameters=1_207_643_972,
            ),
            # 309,687,144 temporal and 83,653,863 spatial parameters; upstream's README says 384M,
            # and its other numbers are in units of 2**20.
            HubPart(
                role="vae",
                repo_id="hpcai-tech/OpenSora-VAE-v1.2",
                needs=(_CONFIG, ("*.safetensors",)),
                extras=("*.safetensors.index.json",),
                num_parameters=393_341_007,
            ),
            T5_XXL,
        ),
        aliases=("opensora", "open-sora", "open-sora-1.2", "opensora-v1.2"),
        note="text of at most 300 tokens",
    ),
    _opensora_1_0("256x256"),
    _opensora_1_0("512x512"),
    _svd(
        "svd",
        "stable-video-diffusion-img2vid",
        "Stable Video Diffusion, 14 frames of a picture",
        ("stable-video-diffusion", "svd-img2vid"),
        "takes a picture and no prompt",
    ),
    _svd(
        "svd-xt",
        "stable-video-diffusion-img2vid-xt",
        "Stable Video Diffusion XT, 25 frames of a picture",
        ("stable-video-diffusion-xt", "svd-img2vid-xt"),
        "takes a picture and no prompt",
    ),
    _svd(
        "svd-xt-1.1",
        "stable-video-diffusion-img2vid-xt-1-1",
        "Stable Video Diffusion XT 1.1, 25 frames of a picture",
        ("stable-video-diffusion-xt-1.1", "svd-xt-1-1"),
        "takes a picture and no prompt; the hub asks you to accept its terms first",
    ),
    _svd_image_decoder("svd-image-decoder", "stable-video-diffusion-img2vid", 14),
    _svd_image_decoder("svd-xt-image-decoder", "stable-video-diffusion-img2vid-xt", 25),
    _step_video(
        "stepvideo-t2v",
        "Step-Video-T2V, up to 204 frames of 992 x 544",
        ("stepvideo", "step-video", "step-video-t2v"),
        "reads Chinese and English; 50 steps",
    ),
    _step_video(
        "stepvideo-t2v-turbo",
        "Step-Video-T2V Turbo, up to 204 frames of 992 x 544",
        ("stepvideo-turbo", "step-video-t2v-turbo"),
        "as stepvideo-t2v in 10 to 15 steps",
    ),
    _inpaint(
        "sd-1.5-inpaint",
        "stable-diffusion-inpainting",
        "Stable Diffusion 1.5 for inpainting, with a ControlNet",
        859_535_364,
        ("sd15-inpaint", "stable-diffusion-inpainting"),
    ),
    _inpaint(
        "sd-1.5",
        "stable-diffusion-v1-5",
        "Stable Diffusion 1.5, inpainting with a ControlNet",
        859_520_964,
        ("sd15", "stable-diffusion-1.5", "stable-diffusion-v1-5"),
    ),
)

# Models that people will try and that this version can't run: hub id or name -> what it is.
REFUSED: Mapping[str, str] = {
    "hpcai-tech/OpenSora-STDiT-v2-stage2": "Open-Sora 1.1",
    "hpcai-tech/OpenSora-STDiT-v2-stage3": "Open-Sora 1.1",
    "opensora-1.1": "Open-Sora 1.1",
    "hpcai-tech/OpenSora-STDiT-v4": "Open-Sora 1.3",
    "hpcai-tech/OpenSora-STDiT-v4-360p": "Open-Sora 1.3",
    "hpcai-tech/OpenSora-STDiT-v3-i2v": "Open-Sora 1.3",
    "hpcai-tech/OpenSora-VAE-v1.3": "Open-Sora 1.3",
    "opensora-1.3": "Open-Sora 1.3",
    "hpcai-tech/Open-Sora-v2": "Open-Sora 2.0",
    "hpcai-tech/Open-Sora-v2-Video-DC-AE": "Open-Sora 2.0",
    "opensora-2.0": "Open-Sora 2.0",
}
SUPPORTED_VERSIONS = "1.0, 1.2"
