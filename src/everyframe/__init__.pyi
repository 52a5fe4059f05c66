"""What `import everyframe` offers, with each option's type and default: for editors and checkers.

Written by docs/generate.py; change the code instead.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from everyframe._version import __version__ as __version__
from everyframe.api import list_runs as list_runs
from everyframe.api import stream as stream
from everyframe.api import trace as trace
from everyframe.api import trace_diff as trace_diff
from everyframe.core.errors import EveryframeError as EveryframeError
from everyframe.core.errors import EveryframeWarning as EveryframeWarning
from everyframe.core.errors import InputError as InputError
from everyframe.core.events import Event
from everyframe.core.lora import Lora
from everyframe.core.plan import Plan as Plan
from everyframe.core.plan import Repair
from everyframe.core.quality import LossyMethod
from everyframe.core.request import Request as Request
from everyframe.engine.calibration import calibrate as calibrate
from everyframe.engine.models.compiled_modules import compile as compile
from everyframe.engine.models.compiled_modules import load_compiled as load_compiled
from everyframe.engine.models.compiled_modules import quantize as quantize
from everyframe.engine.models.compiled_modules import save_compiled as save_compiled
from everyframe.engine.models.save import save as save
from everyframe.engine.results import Output
from everyframe.engine.warm_engine import Engine as Engine
from everyframe.engine.warm_engine import load as load
from everyframe.media.video import Video as Video

__all__ = [
    "Engine",
    "EveryframeError",
    "EveryframeWarning",
    "InputError",
    "Plan",
    "Request",
    "Video",
    "__version__",
    "calibrate",
    "compile",
    "generate",
    "list_runs",
    "load",
    "load_compiled",
    "plan",
    "quantize",
    "resume",
    "run",
    "save",
    "save_compiled",
    "stream",
    "trace",
    "trace_diff",
]

def generate(
    prompt: str | None = None,
    *,
    output: Output = "uint8",
    from_record: str | Path | Mapping[str, Any] | Video | None = None,
    isolate: bool = False,
    run_dir: str | Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    model: str | PathLike[str] | None = None,
    negative_prompt: str | None = None,
    loras: Sequence[Lora] | str | PathLike[str] | Sequence[str | Path | tuple[str, float]] = (),
    components: Mapping[str, str] | Mapping[str, str | PathLike[str]] | Sequence[str] = {},
    size: str | tuple[int, int] | list[int] | None = None,
    height: int | None = None,
    width: int | None = None,
    resolution: str | None = None,
    aspect: str | tuple[int, int] | list[int] | None = None,
    num_frames: int | None = None,
    seconds: float | None = None,
    fps: float | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    seed: int | None = None,
    num_videos: int = 1,
    latents: Any = None,
    image: Any = None,
    last_image: Any = None,
    extend: Any = None,
    chain: int = 1,
    edit_strength: float | None = None,
    dtype: str | torch.dtype = "auto",
    quantize: str = "auto",
    device: str | torch.device = "auto",
    num_devices: int | None = None,
    devices: str | Sequence[str | int | torch.device] | None = None,
    parallel: str = "auto",
    shares: str | Sequence[float] | None = None,
    shard_weights: bool = False,
    max_memory: str | int | None = None,
    max_host_memory: str | int | None = None,
    attention: str | None = None,
    disable: Sequence[str] = (),
    quality: str = "exact",
    compile: bool = False,
    compiled: str | None = None,
    preview: bool = False,
    preview_decoder: str | PathLike[str] | None = None,
    report: str | PathLike[str] | None = None,
    forget_repairs: bool = False,
    force: bool = False,
    fast_paths: Mapping[str, Sequence[str]] | None = None,
    quantized: Mapping[str, str] | None = None,
    method: LossyMethod | None = None,
    repairs: Sequence[Repair] | None = None,
    motion_score: float | None = None,
    image_guidance_scale: float = 3.0,
    text_oscillation: bool = True,
    image_oscillation: bool = True,
    image_fading: bool = True,
    flow_shift: float | None = None,
    clip_frames: int | None = None,
    clip_at: str = "head",
    first_frame: str | None = None,
    first_frame_resolution: str = "768px",
    flux: str | PathLike[str] | None = None,
    vae_scaling: float | None = None,
    truncate_prompt: bool = False,
    vae: str | PathLike[str] | None = None,
    text_encoder: str | PathLike[str] | None = None,
    clip: str | PathLike[str] | None = None,
    aesthetic: float | None = None,
    camera_motion: str | None = None,
    motion_bucket_id: int = 127,
    noise_aug_strength: float = 0.02,
    min_guidance_scale: float = 1.0,
    max_guidance_scale: float = 3.0,
    decode_chunk_size: int | None = None,
    fit: str | None = None,
    variant: str | None = None,
    source: Any = None,
    mask: Any = None,
    controlnet: Any = None,
    control: Any = None,
    strength: float | None = None,
    controlnet_conditioning_scale: float | Sequence[float] = 0.5,
    control_guidance_start: float | Sequence[float] = 0.0,
    control_guidance_end: float | Sequence[float] = 1.0,
    guess_mode: bool = False,
    canny_low: float | None = None,
    canny_high: float | None = None,
    frames_at_once: int = 1,
    unblended: bool = False,
    time_shift: float | None = None,
    pos_magic: str | None = None,
    llm_bias: str = "sqrt",
    base: str | PathLike[str] | None = None,
    option: Mapping[str, Any] | Sequence[str] = {},
    vae_tiling: bool = False,
    trust_remote_code: bool = False,
) -> Video | list[Video]:
    """Make a video; with ``num_videos`` above 1, return a list in the order of their seeds.

    Progress is saved until the run is done, so that `resume` can continue it. Each note or repair
    that the command line prints is an `EveryframeWarning`.

    Args:
        prompt: what the video shows.
        output: ``"uint8"`` gives frames (T, H, W, 3) as ``round(255 x)``, ``"float"`` the float32
            in 0..1 before rounding.
        from_record: a video, its file, a sidecar or a record; other options override it.
        isolate: compute in a separate process, whose crash is an error with the last position.
            Several devices (``num_devices=3``) always have one process each, also in a notebook.
        run_dir: the folder of runs to save in; ``"off"`` saves nothing.
        on_event: called with each event as it happens; see `core.events`.
        model: Name, folder or hub id of the model; the embedded model by default.
        negative_prompt: What it should not show.
        loras: A LoRA that is merged into the weights, FILE[:STRENGTH][@COMPONENT]; may be
            repeated.
        components: A component's weights from a file of their own, as NAME=FILE: a single file
            in its authors' or ComfyUI's form, scaled eight bits, or GGUF; may be repeated.
        size: WIDTHxHEIGHT (pixels).
        height: Height (pixels, > 0, ≤ 16384).
        width: Width (pixels, > 0, ≤ 16384).
        resolution: A named size such as 360p, shaped by --aspect.
        aspect: Width to height, such as 16:9 or 9:16; needs --resolution.
        num_frames: Length (frames, > 0, ≤ 100000).
        seconds: Length (seconds, > 0).
        fps: Frames per second of the video (≥ 0.01, ≤ 1000).
        num_inference_steps: Steps of the sampler (> 0, ≤ 10000).
        guidance_scale: How strongly the prompt steers; 1 is off (≥ 0, ≤ 1000).
        seed: Seed of the noise; without it a random one is drawn, printed and recorded (≥ 0, ≤
            9007199254740991).
        num_videos: Number of videos, with seed, seed + 1, and so on (> 0, ≤ 10000).
        latents: Start noise of unit variance, (1, C, T, H, W), or as the model has it.
        image: Picture of the first frame.
        last_image: Picture of the last frame.
        extend: Video to continue.
        chain: Number of clips, each continuing the one before (> 0, ≤ 1000).
        edit_strength: How much given frames may change: 0 preserves them, 1 ignores them (≥ 0,
            ≤ 1).
        dtype: Precision: auto, fp32, bf16 or fp16.
        quantize: Store the weights of linear layers in 8 bits (lossy): auto (only if nothing
            else makes it fit), none, int8 or fp8; multiply in 8 bits too, by torchao, where
            that is certified here: int8-dynamic or fp8-scaled; or keep a GGUF file's own blocks
            (exact): gguf.
        device: Device: auto, cpu, cuda, cuda:1 or mps.
        num_devices: Number of devices that work together, any number; CPU workers if the
            machine has fewer (> 0, ≤ 256).
        devices: Which devices work together, such as 0,1,2 or cuda:0,cuda:2 or cpu,cpu.
        parallel: How several devices divide the work: auto, or data=N, cfg=N and sequence=N (or
            ulysses=N, ring=N) such as cfg=2,sequence=3.
        shares: Share of the work of each device, such as 24,8.
        shard_weights: Shard the denoiser's weights: each device stores some of its blocks.
        max_memory: Use no more of the device's memory than this, such as 8GB.
        max_host_memory: Use no more of the host's memory than this, such as 16GB.
        attention: Compute attention by this kernel, certified or not: flash, efficient, cudnn
            or math.
        disable: Disable a fast path by its name in `everyframe fast-paths`; may be repeated.
        quality: Closeness to the exact video: exact, a budget such as 32dB (PSNR of the worst
            frame, as measured by `everyframe calibrate`), or a lossy method such as ab2@10 or
            ab2@10+int8-dynamic.
        compile: Compile the blocks of the denoiser; takes minutes at first, and needs a C++
            compiler.
        compiled: Use the blocks in this folder of `everyframe compile`.
        preview: Show small pictures of the predicted video while it is made: as events, and in
            a file next to the output.
        preview_decoder: File or folder of a tiny autoencoder (TAESD or TAEHV) that decodes
            previews.
        report: Folder for a report page on repairs and numeric errors; recording magnitudes
            takes time.
        forget_repairs: Forget the repairs that earlier runs of this model needed on this
            device.
        force: Allow what is refused only for its cost, such as fp16 on a CPU.
        fast_paths: The fast paths of each component, exactly; a record has them.
        quantized: The storage dtype of each component's weights, exactly; a record has it.
        method: The method of a record, whatever the quality leads to now.
        repairs: The repairs to begin with, exactly; a record has them.
        motion_score: Amount of motion, added to the prompt: about 0 (still) to 30 (a lot) for
            Open-Sora 1.2; 1 (still), 4 (usual, by default) to 15 for 2.0, and 0 for none (≥ 0,
            ≤ 1000). For models of opensora2, opensora.
        image_guidance_scale: How strongly given frames steer; 1 is off (≥ 0, ≤ 1000). For
            models of opensora2.
        text_oscillation: Guidance is off in odd steps from 10 on. For models of opensora2.
        image_oscillation: Image guidance is off in odd steps from 10 on. For models of
            opensora2.
        image_fading: Image guidance falls over the steps and rises over the frames; for given
            pictures. For models of opensora2.
        flow_shift: How many of the steps are at high noise; by default by size and length. 1 is
            even (> 0, ≤ 1000). For models of opensora2.
        clip_frames: Frames of the video to continue that are read: 33 by default, or 65 (> 0, ≤
            1000). For models of opensora2.
        clip_at: Where they are: head continues the given video, tail leads up to it. For models
            of opensora2.
        first_frame: Draw a first picture and begin with it: flux draws it by FLUX.1-dev. For
            models of opensora2.
        first_frame_resolution: Size at which it is drawn, before it is resized: 768px or 256px
            at the video's aspect ratio, or video for the video's own size, which takes less
            memory. For models of opensora2.
        flux: Folder or hub id of FLUX.1-dev, if it is not beside the denoiser:
            flux1-dev.safetensors and flux1-dev-ae.safetensors, or diffusers' layout. For models
            of opensora2.
        vae_scaling: Scale of the DC-AE's latents: 1, or 0.493 as in upstream's training (> 0, ≤
            1000). For models of opensora2.
        truncate_prompt: Use the beginning of a prompt that is too long. For models of
            opensora2, opensora, inpaint, stepvideo.
        vae: Folder or hub id of the autoencoder, if it is not beside the denoiser. For models
            of opensora2, opensora.
        text_encoder: Folder or hub id of T5 and its tokenizer, if it is not beside the
            denoiser. For models of opensora2, opensora.
        clip: Folder or hub id of CLIP and its tokenizer, if it is not beside the denoiser. For
            models of opensora2.
        aesthetic: Aesthetic score, 1.2 only: about 4 (plain) to 7 (polished) (≥ 0, ≤ 10). For
            models of opensora.
        camera_motion: Camera motion, 1.2 only, such as "pan left". For models of opensora.
        motion_bucket_id: Amount of motion: about 1 (still) to 255 (a lot) (≥ 0, ≤ 1000). For
            models of svd.
        noise_aug_strength: Noise on the image; more lets the video differ more from it (≥ 0, ≤
            100). For models of svd.
        min_guidance_scale: Guidance of the first frame (≥ 0, ≤ 1000). For models of svd.
        max_guidance_scale: Guidance of the last frame; it rises from the first. 1 is off (≥ 0,
            ≤ 1000). For models of svd.
        decode_chunk_size: Frames decoded at once, by default all; fewer need less memory and
            change the frames (> 0, ≤ 100000). For models of svd.
        fit: Fit given images and videos to the video's size: crop, pad or stretch; by default
            our own models crop, and a diffusers pipeline gets them unchanged. For models of
            svd, inpaint, pipeline.
        variant: Which stored precision of the weights to load if a model has several, such as
            fp16. For models of svd, pipeline.
        source: Video, folder of frames or picture to change: inpainting repaints its masked
            part; a diffusers pipeline gets it as its parameter video. For models of inpaint,
            pipeline.
        mask: What to repaint: white in an image, folder or video of the source's size, or a box
            LEFT,TOP,RIGHT,BOTTOM in pixels. For models of inpaint.
        controlnet: Folder, hub id or short name (canny, inpaint, depth, …) of the ControlNet,
            if it is not in the model's folder; several with commas. For models of inpaint.
        control: What the ControlNet sees: an image, folder or video, or canny or inpaint, which
            are made from the source; with commas for several ControlNets. For models of
            inpaint.
        strength: How far the result may differ from the source; 1, the default of inpainting,
            ignores the source (> 0, ≤ 1). For models of inpaint, pipeline.
        controlnet_conditioning_scale: How strongly the ControlNet steers; with commas for
            several. For models of inpaint.
        control_guidance_start: Share of the steps after which the ControlNet begins to steer.
            For models of inpaint.
        control_guidance_end: Share of the steps after which it stops. For models of inpaint.
        guess_mode: Apply the ControlNet to the prompt's branch of guidance only. For models of
            inpaint.
        canny_low: Lower threshold of canny, 100 by default: edges above it that touch a strong
            edge (≥ 0, ≤ 10000). For models of inpaint.
        canny_high: Upper threshold of canny, 200 by default: edges above it are strong (≥ 0, ≤
            10000). For models of inpaint.
        frames_at_once: Frames denoised and decoded together; more need more memory (> 0, ≤
            1000). For models of inpaint.
        unblended: Return the decoder's output outside the mask too, as diffusers does, and not
            the source. For models of inpaint.
        time_shift: How many of the steps are at high noise; above 1 is more (> 0, ≤ 1000). For
            models of stepvideo.
        pos_magic: Text added after the prompt; '' for none. By default upstream's words for
            quality. For models of stepvideo.
        llm_bias: How Step-LLM weighs the distance of words: sqrt (derived, not verified),
            linear or none. For models of stepvideo.
        base: Folder or hub id of step_llm, hunyuan_clip and vae, if they are not beside the
            denoiser. For models of stepvideo.
        option: A parameter that only this pipeline has, as NAME=VALUE; may be given several
            times. A video, picture or .npy of numbers is named by its file. For models of
            pipeline.
        vae_tiling: Decode in tiles: far less memory for large frames, and faint seams. For
            models of pipeline.
        trust_remote_code: Run Python code that comes with the checkpoint. Read it first. For
            models of pipeline.

    Raises:
        InputError: an option is invalid.
        CannotRunError: this machine is too small for it.
        WorkerDiedError: a process of `isolate`, or of one of several devices, crashed.
    """

def plan(
    request: Request | str | None = None,
    *,
    profile: str | Path | None = None,
    prompt: str | None = None,
    model: str | PathLike[str] | None = None,
    negative_prompt: str | None = None,
    loras: Sequence[Lora] | str | PathLike[str] | Sequence[str | Path | tuple[str, float]] = (),
    components: Mapping[str, str] | Mapping[str, str | PathLike[str]] | Sequence[str] = {},
    size: str | tuple[int, int] | list[int] | None = None,
    height: int | None = None,
    width: int | None = None,
    resolution: str | None = None,
    aspect: str | tuple[int, int] | list[int] | None = None,
    num_frames: int | None = None,
    seconds: float | None = None,
    fps: float | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    seed: int | None = None,
    num_videos: int = 1,
    latents: Any = None,
    image: Any = None,
    last_image: Any = None,
    extend: Any = None,
    chain: int = 1,
    edit_strength: float | None = None,
    dtype: str | torch.dtype = "auto",
    quantize: str = "auto",
    device: str | torch.device = "auto",
    num_devices: int | None = None,
    devices: str | Sequence[str | int | torch.device] | None = None,
    parallel: str = "auto",
    shares: str | Sequence[float] | None = None,
    shard_weights: bool = False,
    max_memory: str | int | None = None,
    max_host_memory: str | int | None = None,
    attention: str | None = None,
    disable: Sequence[str] = (),
    quality: str = "exact",
    compile: bool = False,
    compiled: str | None = None,
    preview: bool = False,
    preview_decoder: str | PathLike[str] | None = None,
    report: str | PathLike[str] | None = None,
    forget_repairs: bool = False,
    force: bool = False,
    fast_paths: Mapping[str, Sequence[str]] | None = None,
    quantized: Mapping[str, str] | None = None,
    method: LossyMethod | None = None,
    repairs: Sequence[Repair] | None = None,
    motion_score: float | None = None,
    image_guidance_scale: float = 3.0,
    text_oscillation: bool = True,
    image_oscillation: bool = True,
    image_fading: bool = True,
    flow_shift: float | None = None,
    clip_frames: int | None = None,
    clip_at: str = "head",
    first_frame: str | None = None,
    first_frame_resolution: str = "768px",
    flux: str | PathLike[str] | None = None,
    vae_scaling: float | None = None,
    truncate_prompt: bool = False,
    vae: str | PathLike[str] | None = None,
    text_encoder: str | PathLike[str] | None = None,
    clip: str | PathLike[str] | None = None,
    aesthetic: float | None = None,
    camera_motion: str | None = None,
    motion_bucket_id: int = 127,
    noise_aug_strength: float = 0.02,
    min_guidance_scale: float = 1.0,
    max_guidance_scale: float = 3.0,
    decode_chunk_size: int | None = None,
    fit: str | None = None,
    variant: str | None = None,
    source: Any = None,
    mask: Any = None,
    controlnet: Any = None,
    control: Any = None,
    strength: float | None = None,
    controlnet_conditioning_scale: float | Sequence[float] = 0.5,
    control_guidance_start: float | Sequence[float] = 0.0,
    control_guidance_end: float | Sequence[float] = 1.0,
    guess_mode: bool = False,
    canny_low: float | None = None,
    canny_high: float | None = None,
    frames_at_once: int = 1,
    unblended: bool = False,
    time_shift: float | None = None,
    pos_magic: str | None = None,
    llm_bias: str = "sqrt",
    base: str | PathLike[str] | None = None,
    option: Mapping[str, Any] | Sequence[str] = {},
    vae_tiling: bool = False,
    trust_remote_code: bool = False,
) -> Plan:
    """Plan a request: what would run, in which precision, with how much memory and about how long.

    Nothing is loaded or fetched.

    Args:
        request: a request, or the prompt.
        profile: plan for another machine: the name of a shipped profile, or a file of facts.
        prompt: What the video shows.
        model: Name, folder or hub id of the model; the embedded model by default.
        negative_prompt: What it should not show.
        loras: A LoRA that is merged into the weights, FILE[:STRENGTH][@COMPONENT]; may be
            repeated.
        components: A component's weights from a file of their own, as NAME=FILE: a single file
            in its authors' or ComfyUI's form, scaled eight bits, or GGUF; may be repeated.
        size: WIDTHxHEIGHT (pixels).
        height: Height (pixels, > 0, ≤ 16384).
        width: Width (pixels, > 0, ≤ 16384).
        resolution: A named size such as 360p, shaped by --aspect.
        aspect: Width to height, such as 16:9 or 9:16; needs --resolution.
        num_frames: Length (frames, > 0, ≤ 100000).
        seconds: Length (seconds, > 0).
        fps: Frames per second of the video (≥ 0.01, ≤ 1000).
        num_inference_steps: Steps of the sampler (> 0, ≤ 10000).
        guidance_scale: How strongly the prompt steers; 1 is off (≥ 0, ≤ 1000).
        seed: Seed of the noise; without it a random one is drawn, printed and recorded (≥ 0, ≤
            9007199254740991).
        num_videos: Number of videos, with seed, seed + 1, and so on (> 0, ≤ 10000).
        latents: Start noise of unit variance, (1, C, T, H, W), or as the model has it.
        image: Picture of the first frame.
        last_image: Picture of the last frame.
        extend: Video to continue.
        chain: Number of clips, each continuing the one before (> 0, ≤ 1000).
        edit_strength: How much given frames may change: 0 preserves them, 1 ignores them (≥ 0,
            ≤ 1).
        dtype: Precision: auto, fp32, bf16 or fp16.
        quantize: Store the weights of linear layers in 8 bits (lossy): auto (only if nothing
            else makes it fit), none, int8 or fp8; multiply in 8 bits too, by torchao, where
            that is certified here: int8-dynamic or fp8-scaled; or keep a GGUF file's own blocks
            (exact): gguf.
        device: Device: auto, cpu, cuda, cuda:1 or mps.
        num_devices: Number of devices that work together, any number; CPU workers if the
            machine has fewer (> 0, ≤ 256).
        devices: Which devices work together, such as 0,1,2 or cuda:0,cuda:2 or cpu,cpu.
        parallel: How several devices divide the work: auto, or data=N, cfg=N and sequence=N (or
            ulysses=N, ring=N) such as cfg=2,sequence=3.
        shares: Share of the work of each device, such as 24,8.
        shard_weights: Shard the denoiser's weights: each device stores some of its blocks.
        max_memory: Use no more of the device's memory than this, such as 8GB.
        max_host_memory: Use no more of the host's memory than this, such as 16GB.
        attention: Compute attention by this kernel, certified or not: flash, efficient, cudnn
            or math.
        disable: Disable a fast path by its name in `everyframe fast-paths`; may be repeated.
        quality: Closeness to the exact video: exact, a budget such as 32dB (PSNR of the worst
            frame, as measured by `everyframe calibrate`), or a lossy method such as ab2@10 or
            ab2@10+int8-dynamic.
        compile: Compile the blocks of the denoiser; takes minutes at first, and needs a C++
            compiler.
        compiled: Use the blocks in this folder of `everyframe compile`.
        preview: Show small pictures of the predicted video while it is made: as events, and in
            a file next to the output.
        preview_decoder: File or folder of a tiny autoencoder (TAESD or TAEHV) that decodes
            previews.
        report: Folder for a report page on repairs and numeric errors; recording magnitudes
            takes time.
        forget_repairs: Forget the repairs that earlier runs of this model needed on this
            device.
        force: Allow what is refused only for its cost, such as fp16 on a CPU.
        fast_paths: The fast paths of each component, exactly; a record has them.
        quantized: The storage dtype of each component's weights, exactly; a record has it.
        method: The method of a record, whatever the quality leads to now.
        repairs: The repairs to begin with, exactly; a record has them.
        motion_score: Amount of motion, added to the prompt: about 0 (still) to 30 (a lot) for
            Open-Sora 1.2; 1 (still), 4 (usual, by default) to 15 for 2.0, and 0 for none (≥ 0,
            ≤ 1000). For models of opensora2, opensora.
        image_guidance_scale: How strongly given frames steer; 1 is off (≥ 0, ≤ 1000). For
            models of opensora2.
        text_oscillation: Guidance is off in odd steps from 10 on. For models of opensora2.
        image_oscillation: Image guidance is off in odd steps from 10 on. For models of
            opensora2.
        image_fading: Image guidance falls over the steps and rises over the frames; for given
            pictures. For models of opensora2.
        flow_shift: How many of the steps are at high noise; by default by size and length. 1 is
            even (> 0, ≤ 1000). For models of opensora2.
        clip_frames: Frames of the video to continue that are read: 33 by default, or 65 (> 0, ≤
            1000). For models of opensora2.
        clip_at: Where they are: head continues the given video, tail leads up to it. For models
            of opensora2.
        first_frame: Draw a first picture and begin with it: flux draws it by FLUX.1-dev. For
            models of opensora2.
        first_frame_resolution: Size at which it is drawn, before it is resized: 768px or 256px
            at the video's aspect ratio, or video for the video's own size, which takes less
            memory. For models of opensora2.
        flux: Folder or hub id of FLUX.1-dev, if it is not beside the denoiser:
            flux1-dev.safetensors and flux1-dev-ae.safetensors, or diffusers' layout. For models
            of opensora2.
        vae_scaling: Scale of the DC-AE's latents: 1, or 0.493 as in upstream's training (> 0, ≤
            1000). For models of opensora2.
        truncate_prompt: Use the beginning of a prompt that is too long. For models of
            opensora2, opensora, inpaint, stepvideo.
        vae: Folder or hub id of the autoencoder, if it is not beside the denoiser. For models
            of opensora2, opensora.
        text_encoder: Folder or hub id of T5 and its tokenizer, if it is not beside the
            denoiser. For models of opensora2, opensora.
        clip: Folder or hub id of CLIP and its tokenizer, if it is not beside the denoiser. For
            models of opensora2.
        aesthetic: Aesthetic score, 1.2 only: about 4 (plain) to 7 (polished) (≥ 0, ≤ 10). For
            models of opensora.
        camera_motion: Camera motion, 1.2 only, such as "pan left". For models of opensora.
        motion_bucket_id: Amount of motion: about 1 (still) to 255 (a lot) (≥ 0, ≤ 1000). For
            models of svd.
        noise_aug_strength: Noise on the image; more lets the video differ more from it (≥ 0, ≤
            100). For models of svd.
        min_guidance_scale: Guidance of the first frame (≥ 0, ≤ 1000). For models of svd.
        max_guidance_scale: Guidance of the last frame; it rises from the first. 1 is off (≥ 0,
            ≤ 1000). For models of svd.
        decode_chunk_size: Frames decoded at once, by default all; fewer need less memory and
            change the frames (> 0, ≤ 100000). For models of svd.
        fit: Fit given images and videos to the video's size: crop, pad or stretch; by default
            our own models crop, and a diffusers pipeline gets them unchanged. For models of
            svd, inpaint, pipeline.
        variant: Which stored precision of the weights to load if a model has several, such as
            fp16. For models of svd, pipeline.
        source: Video, folder of frames or picture to change: inpainting repaints its masked
            part; a diffusers pipeline gets it as its parameter video. For models of inpaint,
            pipeline.
        mask: What to repaint: white in an image, folder or video of the source's size, or a box
            LEFT,TOP,RIGHT,BOTTOM in pixels. For models of inpaint.
        controlnet: Folder, hub id or short name (canny, inpaint, depth, …) of the ControlNet,
            if it is not in the model's folder; several with commas. For models of inpaint.
        control: What the ControlNet sees: an image, folder or video, or canny or inpaint, which
            are made from the source; with commas for several ControlNets. For models of
            inpaint.
        strength: How far the result may differ from the source; 1, the default of inpainting,
            ignores the source (> 0, ≤ 1). For models of inpaint, pipeline.
        controlnet_conditioning_scale: How strongly the ControlNet steers; with commas for
            several. For models of inpaint.
        control_guidance_start: Share of the steps after which the ControlNet begins to steer.
            For models of inpaint.
        control_guidance_end: Share of the steps after which it stops. For models of inpaint.
        guess_mode: Apply the ControlNet to the prompt's branch of guidance only. For models of
            inpaint.
        canny_low: Lower threshold of canny, 100 by default: edges above it that touch a strong
            edge (≥ 0, ≤ 10000). For models of inpaint.
        canny_high: Upper threshold of canny, 200 by default: edges above it are strong (≥ 0, ≤
            10000). For models of inpaint.
        frames_at_once: Frames denoised and decoded together; more need more memory (> 0, ≤
            1000). For models of inpaint.
        unblended: Return the decoder's output outside the mask too, as diffusers does, and not
            the source. For models of inpaint.
        time_shift: How many of the steps are at high noise; above 1 is more (> 0, ≤ 1000). For
            models of stepvideo.
        pos_magic: Text added after the prompt; '' for none. By default upstream's words for
            quality. For models of stepvideo.
        llm_bias: How Step-LLM weighs the distance of words: sqrt (derived, not verified),
            linear or none. For models of stepvideo.
        base: Folder or hub id of step_llm, hunyuan_clip and vae, if they are not beside the
            denoiser. For models of stepvideo.
        option: A parameter that only this pipeline has, as NAME=VALUE; may be given several
            times. A video, picture or .npy of numbers is named by its file. For models of
            pipeline.
        vae_tiling: Decode in tiles: far less memory for large frames, and faint seams. For
            models of pipeline.
        trust_remote_code: Run Python code that comes with the checkpoint. Read it first. For
            models of pipeline.
    """

def resume(
    run: str | Path | None = None,
    *,
    pipe: Any = None,
    output: Output = "uint8",
    trust_remote_code: bool = False,
    on_event: Callable[[Event], None] | None = None,
    num_devices: int | None = None,
    devices: str | Sequence[str | int | torch.device] | None = None,
    parallel: str = "auto",
    shares: str | Sequence[float] | None = None,
    shard_weights: bool = False,
    **options: Any,
) -> Video | list[Video] | Any:
    """Resume an interrupted run; the videos equal those of an uninterrupted run, bit for bit.

    An `EveryframeWarning` names the run and where it resumes.

    Args:
        run: its name or folder (see `list_runs`); by default the latest interrupted run, or with
            `pipe` the latest of that pipeline.
        pipe: the loaded pipeline, for a run of `everyframe.run`; another pipeline is refused.
        output: as in `generate`; frames of earlier clips saved for ``"uint8"`` are no finer.
        trust_remote_code: allow code that comes with the checkpoint; must be given again.
        on_event: as in `generate`.
        num_devices: Number of devices that work together, any number; CPU workers if the
            machine has fewer (> 0, ≤ 256).
        devices: Which devices work together, such as 0,1,2 or cuda:0,cuda:2 or cpu,cpu.
        parallel: How several devices divide the work: auto, or data=N, cfg=N and sequence=N (or
            ulysses=N, ring=N) such as cfg=2,sequence=3.
        shares: Share of the work of each device, such as 24,8.
        shard_weights: Shard the denoiser's weights: each device stores some of its blocks.
        options: ``num_devices``, ``devices``, ``parallel``, ``shares`` and ``shard_weights`` of
            `generate`, to resume on other devices; then the videos are equal up to rounding. Others
            name a file or model of the run again (``image="cat.png"``), which a run needs that
            somebody else made.

    Raises:
        InputError: there is no such run, or something that it needs has changed.
    """

def run(
    pipe: Any,
    prompt: str | list[str] | Mapping[int, str] | None = None,
    *,
    output: Output | None = None,
    on_event: Callable[[Event], None] | None = None,
    from_record: str | Path | Mapping[str, Any] | Video | None = None,
    model: str | PathLike[str] | None = None,
    negative_prompt: str | Sequence[str] | Mapping[int, str] | None = None,
    loras: Sequence[Lora] | str | PathLike[str] | Sequence[str | Path | tuple[str, float]] = (),
    components: Mapping[str, str] | Mapping[str, str | PathLike[str]] | Sequence[str] = {},
    size: str | tuple[int, int] | list[int] | None = None,
    height: int | None = None,
    width: int | None = None,
    resolution: str | None = None,
    aspect: str | tuple[int, int] | list[int] | None = None,
    num_frames: int | None = None,
    seconds: float | None = None,
    fps: float | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    seed: int | None = None,
    num_videos: int = 1,
    latents: Any = None,
    image: Any = None,
    last_image: Any = None,
    extend: Any = None,
    chain: int = 1,
    edit_strength: float | None = None,
    dtype: str | torch.dtype = "auto",
    quantize: str = "auto",
    device: str | torch.device = "auto",
    num_devices: int | None = None,
    devices: str | Sequence[str | int | torch.device] | None = None,
    parallel: str = "auto",
    shares: str | Sequence[float] | None = None,
    shard_weights: bool = False,
    max_memory: str | int | None = None,
    max_host_memory: str | int | None = None,
    attention: str | None = None,
    disable: Sequence[str] = (),
    quality: str = "exact",
    compile: bool = False,
    compiled: str | None = None,
    preview: bool = False,
    preview_decoder: str | PathLike[str] | None = None,
    report: str | PathLike[str] | None = None,
    forget_repairs: bool = False,
    force: bool = False,
    fast_paths: Mapping[str, Sequence[str]] | None = None,
    quantized: Mapping[str, str] | None = None,
    method: LossyMethod | None = None,
    repairs: Sequence[Repair] | None = None,
    option: Mapping[str, Any] | Sequence[str] = {},
    source: Any = None,
    strength: float | None = None,
    fit: str | None = None,
    vae_tiling: bool = False,
    variant: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Video | list[Video] | Any:
    """Make a video with a loaded diffusers pipeline; return a list for several.

    The pipeline runs as it is, on its device and in its dtypes, and is left unchanged. It is called
    in this thread with torch's current settings: autocast, threads, TF32, modes. Notes and repairs
    are warnings, as in `generate`. With ``output_type`` ``"pt"``, ``"pil"`` or ``"latent"`` the
    pipeline's own output is returned, in diffusers' format; with ``"np"`` a `Video` with frames as
    ``output="float"`` gives them.

    Args:
        pipe: a diffusers pipeline for text or image to video, standard or modular.
        prompt: what the video shows; a list makes as many videos in one call.
        output: as in `generate`.
        on_event: called with each event as it happens; see `core.events`.
        from_record: a video, its file, a sidecar or a record; other options override it.
        model: Name, folder or hub id of the model; the embedded model by default.
        negative_prompt: What it should not show.
        loras: A LoRA that is merged into the weights, FILE[:STRENGTH][@COMPONENT]; may be
            repeated.
        components: A component's weights from a file of their own, as NAME=FILE: a single file
            in its authors' or ComfyUI's form, scaled eight bits, or GGUF; may be repeated.
        size: WIDTHxHEIGHT (pixels).
        height: Height (pixels, > 0, ≤ 16384).
        width: Width (pixels, > 0, ≤ 16384).
        resolution: A named size such as 360p, shaped by --aspect.
        aspect: Width to height, such as 16:9 or 9:16; needs --resolution.
        num_frames: Length (frames, > 0, ≤ 100000).
        seconds: Length (seconds, > 0).
        fps: Frames per second of the video (≥ 0.01, ≤ 1000).
        num_inference_steps: Steps of the sampler (> 0, ≤ 10000).
        guidance_scale: How strongly the prompt steers; 1 is off (≥ 0, ≤ 1000).
        seed: Seed of the noise; without it a random one is drawn, printed and recorded (≥ 0, ≤
            9007199254740991).
        num_videos: Number of videos, with seed, seed + 1, and so on (> 0, ≤ 10000).
        latents: Start noise of unit variance, (1, C, T, H, W), or as the model has it.
        image: Picture of the first frame.
        last_image: Picture of the last frame.
        extend: Video to continue.
        chain: Number of clips, each continuing the one before (> 0, ≤ 1000).
        edit_strength: How much given frames may change: 0 preserves them, 1 ignores them (≥ 0,
            ≤ 1).
        dtype: Precision: auto, fp32, bf16 or fp16.
        quantize: Store the weights of linear layers in 8 bits (lossy): auto (only if nothing
            else makes it fit), none, int8 or fp8; multiply in 8 bits too, by torchao, where
            that is certified here: int8-dynamic or fp8-scaled; or keep a GGUF file's own blocks
            (exact): gguf.
        device: Device: auto, cpu, cuda, cuda:1 or mps.
        num_devices: Number of devices that work together, any number; CPU workers if the
            machine has fewer (> 0, ≤ 256).
        devices: Which devices work together, such as 0,1,2 or cuda:0,cuda:2 or cpu,cpu.
        parallel: How several devices divide the work: auto, or data=N, cfg=N and sequence=N (or
            ulysses=N, ring=N) such as cfg=2,sequence=3.
        shares: Share of the work of each device, such as 24,8.
        shard_weights: Shard the denoiser's weights: each device stores some of its blocks.
        max_memory: Use no more of the device's memory than this, such as 8GB.
        max_host_memory: Use no more of the host's memory than this, such as 16GB.
        attention: Compute attention by this kernel, certified or not: flash, efficient, cudnn
            or math.
        disable: Disable a fast path by its name in `everyframe fast-paths`; may be repeated.
        quality: Closeness to the exact video: exact, a budget such as 32dB (PSNR of the worst
            frame, as measured by `everyframe calibrate`), or a lossy method such as ab2@10 or
            ab2@10+int8-dynamic.
        compile: Compile the blocks of the denoiser; takes minutes at first, and needs a C++
            compiler.
        compiled: Use the blocks in this folder of `everyframe compile`.
        preview: Show small pictures of the predicted video while it is made: as events, and in
            a file next to the output.
        preview_decoder: File or folder of a tiny autoencoder (TAESD or TAEHV) that decodes
            previews.
        report: Folder for a report page on repairs and numeric errors; recording magnitudes
            takes time.
        forget_repairs: Forget the repairs that earlier runs of this model needed on this
            device.
        force: Allow what is refused only for its cost, such as fp16 on a CPU.
        fast_paths: The fast paths of each component, exactly; a record has them.
        quantized: The storage dtype of each component's weights, exactly; a record has it.
        method: The method of a record, whatever the quality leads to now.
        repairs: The repairs to begin with, exactly; a record has them.
        option: A parameter that only this pipeline has, as NAME=VALUE; may be given several
            times. A video, picture or .npy of numbers is named by its file. For models of
            pipeline.
        source: Video, folder of frames or picture to change: inpainting repaints its masked
            part; a diffusers pipeline gets it as its parameter video. For models of inpaint,
            pipeline.
        strength: How far the result may differ from the source; 1, the default of inpainting,
            ignores the source (> 0, ≤ 1). For models of inpaint, pipeline.
        fit: Fit given images and videos to the video's size: crop, pad or stretch; by default
            our own models crop, and a diffusers pipeline gets them unchanged. For models of
            svd, inpaint, pipeline.
        vae_tiling: Decode in tiles: far less memory for large frames, and faint seams. For
            models of pipeline.
        variant: Which stored precision of the weights to load if a model has several, such as
            fp16. For models of svd, pipeline.
        trust_remote_code: Run Python code that comes with the checkpoint. Read it first. For
            models of pipeline.
        options: every option of `Request`, and every parameter of the pipeline's own call.

    Raises:
        InputError: not a video pipeline, or an option that it doesn't accept.
    """
