"""Fields of the API's bodies as data: aliases, ignored fields, refused fields and the reasons.

The fields themselves are those of `everyframe.core.request.Request` and of the families' options.
Aliases are the names of OpenAI's client, vLLM-Omni, SGLang, FastVideo, TensorRT-LLM and LightX2V.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Name in a body -> name of the option.
OTHER_NAMES: Mapping[str, str] = {
    "input_reference": "image",
    "image_reference": "image",
    "reference_url": "image",
    "video_reference": "extend",
    "video_url": "extend",
    "video": "extend",
    "n": "num_videos",
    "num_outputs_per_prompt": "num_videos",
    "short_edge": "resolution",
    "aspect_ratio": "aspect",
    "steps": "num_inference_steps",
    "frames": "num_frames",
    "cfg": "guidance_scale",
    "lora": "loras",
    "without": "disable",
}

#: Options of diffusers pipelines that peers take beside the common ones; other models have none.
PIPELINE_FIELDS = ("guidance_scale_2", "true_cfg_scale", "boundary_ratio", "max_sequence_length")

#: Formats of `output_format`: what the server writes.
FORMATS = ("mp4",)

#: Objects whose entries are fields like those beside them.
MERGED = ("extra_body", "extra_params")

#: Fields of peers that change nothing here; they are noted in ``warnings``, and why.
NOTED: Mapping[str, str] = {
    "quality": "quality is exact unless it is a budget such as 32dB",
    "user": "",
    "generator_device": "noise is the same on every device",
    "enable_teacache": "step caches are asked for by quality, such as 32dB",
    "enable_cache_dit": "step caches are asked for by quality, such as 32dB",
    "cache_dit_params": "step caches are asked for by quality, such as 32dB",
    "output_quality": "videos are written in one quality",
    "output_compression": "videos are written in one quality",
    "x264_preset": "videos are written in one quality",
    "return_stage_metrics": "stage_durations is always there",
    "response_format": "videos are fetched by /content",
    "attention_backend_override": "kernels are chosen by certificates; attention names one",
}
#: Values of ``quality`` that peers' clients send, which are no budget of ours.
PEERS_QUALITIES = frozenset({"standard", "hd", "low", "medium", "high", "lossless", "auto"})

#: Why an option is refused that is a path, and one that decides about the machine.
PATH = "clients do not name paths of the server"
OPERATOR = "whoever runs the server decides this"

#: Options that are or may hold a path or a model, and what reads a client's value in their place:
#: the table of models, that of LoRAs, and a check of each text. `data_folder.MEDIA` are uploads.
CHECKED_PATHS = frozenset({"model", "loras", "option"})

#: Options of a run's own user that clients may set too.
CLIENTS_CHOICES = frozenset({"attention", "preview"})

#: Further fields that are refused by name, and why. Options that are paths, or that only the user
#: of a run sets, are refused by what they say of themselves (`client_options.py`).
REFUSED: Mapping[str, str] = {
    **dict.fromkeys((
        "output", "output_path", "save_result_path", "file_path", "video_path", "image_path",
        "perf_dump_path", "frame_interpolation_model_path", "upscaling_model_path",
    ), PATH),
    "variant": OPERATOR,
    "latents": "start noise can't be sent; give a seed",
    "method": "give quality",
    "family_options": "give each option by its own name",
    "enable_frame_interpolation": "frames are not interpolated",
    "enable_upscaling": "videos are not upscaled",
    "enhance_prompt": "prompts are not rewritten",
}  # fmt: skip
