"""Request: the options that all families share, as one frozen value.

A `Request` holds nothing about the machine and no defaults. `everyframe.planning.resolve` turns it
into a `Plan`, in which every value is resolved.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationInfo, field_validator, model_validator

from everyframe.core.bytes import parse_bytes
from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.limits import MAX_FRAMES, MAX_SEED, MAX_SIDE, MIN_FPS
from everyframe.core.lora import Lora
from everyframe.core.option_values import REPEATED, SPELLED, option_text, with_current_names
from everyframe.core.options import Options, option
from everyframe.core.parallel_plan import parse_parallel
from everyframe.core.plan import Repair
from everyframe.core.quality import EXACT, PRODUCTS, LossyMethod, parse_quality
from everyframe.core.video_size import check_sizes, parse_size

#: Spellings of each precision; with `auto` the planner chooses.
DTYPES = {
    "auto": "auto",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}

#: Storage of linear layers' weights; with `auto` the planner chooses.
QUANTIZE = ("auto", "none", "int8", "fp8", *PRODUCTS, "gguf")


class Request(Options):
    """A requested video. Sizes in pixels, lengths in frames or seconds.

    Options of one family (``aesthetic``, ``motion_score``, ...) are passed like any other. They
    stay in `family_options` until the model, and with it the family, is known. Raises `InputError`
    for values that no model accepts.
    """

    prompt: str | None = option("What the video shows.", group="What", call_only=True)
    model: str | None = option(
        "Name, folder or hub id of the model; the embedded model by default.",
        group="What",
        aliases=("-m",),
        names_model=True,
    )
    negative_prompt: str | None = option("What it should not show.", group="What")
    loras: tuple[Lora, ...] = option(
        "A LoRA that is merged into the weights, FILE[:STRENGTH][@COMPONENT]; may be repeated.",
        group="What",
        aliases=("--lora",),
        default=(),
        accepts=("str", "PathLike[str]", "Sequence[str | Path | tuple[str, float]]"),
    )
    components: dict[str, str] = option(
        "A component's weights from a file of their own, as NAME=FILE: a single file in its "
        "authors' or ComfyUI's form, scaled eight bits, or GGUF; may be repeated.",
        group="What",
        aliases=("--component",),
        default={},
        accepts=("Mapping[str, str | PathLike[str]]", "Sequence[str]"),
        names_path=True,
    )

    size: str | None = option(
        "WIDTHxHEIGHT.",
        group="Size and length",
        unit="pixels",
        accepts=("tuple[int, int]", "list[int]"),
    )
    height: int | None = option(
        "Height.", group="Size and length", unit="pixels", gt=0, le=MAX_SIDE
    )
    width: int | None = option("Width.", group="Size and length", unit="pixels", gt=0, le=MAX_SIDE)
    resolution: str | None = option(
        "A named size such as 360p, shaped by --aspect.", group="Size and length"
    )
    aspect: str | None = option(
        "Width to height, such as 16:9 or 9:16; needs --resolution.",
        group="Size and length",
        accepts=("tuple[int, int]", "list[int]"),
    )
    num_frames: int | None = option(
        "Length.",
        group="Size and length",
        unit="frames",
        aliases=("--frames",),
        gt=0,
        le=MAX_FRAMES,
    )
    seconds: float | None = option("Length.", group="Size and length", unit="seconds", gt=0)
    fps: float | None = option(
        "Frames per second of the video.", group="Size and length", ge=MIN_FPS, le=1000
    )

    num_inference_steps: int | None = option(
        "Steps of the sampler.", group="Sampling", aliases=("--steps",), gt=0, le=10_000
    )
    guidance_scale: float | None = option(
        "How strongly the prompt steers; 1 is off.",
        group="Sampling",
        aliases=("--cfg",),
        ge=0,
        le=1000,
    )
    seed: int | None = option(
        "Seed of the noise; without it a random one is drawn, printed and recorded.",
        group="Sampling",
        ge=0,
        le=MAX_SEED,
    )
    num_videos: int = option(
        "Number of videos, with seed, seed + 1, and so on.",
        group="Sampling",
        default=1,
        gt=0,
        le=10_000,
    )
    latents: Any = option(
        "Start noise of unit variance, (1, C, T, H, W), or as the model has it.",
        group="Sampling",
        python_only=True,
    )

    image: Any = option(
        "Picture of the first frame.", group="Given frames", names_path=True, call_only=True
    )
    last_image: Any = option(
        "Picture of the last frame.", group="Given frames", names_path=True, call_only=True
    )
    extend: Any = option(
        "Video to continue.", group="Given frames", names_path=True, call_only=True
    )
    chain: int = option(
        "Number of clips, each continuing the one before.",
        group="Given frames",
        default=1,
        gt=0,
        le=1000,
    )
    edit_strength: float | None = option(
        "How much given frames may change: 0 preserves them, 1 ignores them.",
        group="Given frames",
        ge=0,
        le=1,
    )

    dtype: str = option(
        "Precision: auto, fp32, bf16 or fp16.",
        group="Machine",
        default="auto",
        accepts=("torch.dtype",),
    )
    quantize: str = option(
        "Store the weights of linear layers in 8 bits (lossy): auto (only if nothing else makes "
        "it fit), none, int8 or fp8; multiply in 8 bits too, by torchao, where that is certified "
        "here: int8-dynamic or fp8-scaled; or keep a GGUF file's own blocks (exact): gguf.",
        group="Machine",
        default="auto",
    )
    device: str = option(
        "Device: auto, cpu, cuda, cuda:1 or mps.",
        group="Machine",
        default="auto",
        person_only=True,
        accepts=("torch.device",),
    )
    num_devices: int | None = option(
        "Number of devices that work together, any number; CPU workers if the machine has fewer.",
        group="Machine",
        aliases=("--num-gpus",),
        gt=0,
        le=256,
        person_only=True,
    )
    devices: str | None = option(
        "Which devices work together, such as 0,1,2 or cuda:0,cuda:2 or cpu,cpu.",
        group="Machine",
        person_only=True,
        accepts=("Sequence[str | int | torch.device]",),
    )
    parallel: str = option(
        "How several devices divide the work: auto, or data=N, cfg=N and sequence=N (or "
        "ulysses=N, ring=N) such as cfg=2,sequence=3.",
        group="Machine",
        default="auto",
        person_only=True,
    )
    shares: str | None = option(
        "Share of the work of each device, such as 24,8.",
        group="Machine",
        person_only=True,
        accepts=("Sequence[float]",),
    )
    shard_weights: bool = option(
        "Shard the denoiser's weights: each device stores some of its blocks.",
        group="Machine",
        default=False,
        person_only=True,
    )
    max_memory: str | None = option(
        "Use no more of the device's memory than this, such as 8GB.",
        group="Machine",
        person_only=True,
        accepts=("int",),
    )
    max_host_memory: str | None = option(
        "Use no more of the host's memory than this, such as 16GB.",
        group="Machine",
        person_only=True,
        accepts=("int",),
    )
    attention: str | None = option(
        "Compute attention by this kernel, certified or not: flash, efficient, cudnn or math.",
        group="Machine",
        person_only=True,
    )
    disable: tuple[str, ...] = option(
        "Disable a fast path by its name in `everyframe fast-paths`; may be repeated.",
        group="Machine",
        aliases=("--without",),
        default=(),
    )
    quality: str = option(
        "Closeness to the exact video: exact, a budget such as 32dB (PSNR of the worst frame, as "
        "measured by `everyframe calibrate`), or a lossy method such as ab2@10 or "
        "ab2@10+int8-dynamic.",
        group="Sampling",
        default=EXACT,
    )
    compile: bool = option(
        "Compile the blocks of the denoiser; takes minutes at first, and needs a C++ compiler.",
        group="Machine",
        default=False,
        person_only=True,
    )
    compiled: str | None = option(
        "Use the blocks in this folder of `everyframe compile`.",
        group="Machine",
        names_path=True,
        person_only=True,
    )
    preview: bool = option(
        "Show small pictures of the predicted video while it is made: as events, and in a file "
        "next to the output.",
        group="Machine",
        default=False,
        person_only=True,
    )
    preview_decoder: str | None = option(
        "File or folder of a tiny autoencoder (TAESD or TAEHV) that decodes previews.",
        group="Machine",
        person_only=True,
        accepts=("PathLike[str]",),
    )
    report: str | None = option(
        "Folder for a report page on repairs and numeric errors; recording magnitudes takes time.",
        group="Machine",
        person_only=True,
        call_only=True,
        accepts=("PathLike[str]",),
    )
    forget_repairs: bool = option(
        "Forget the repairs that earlier runs of this model needed on this device.",
        group="Machine",
        default=False,
        person_only=True,
        call_only=True,
    )
    force: bool = option(
        "Allow what is refused only for its cost, such as fp16 on a CPU.",
        group="Machine",
        default=False,
        person_only=True,
        call_only=True,
    )

    fast_paths: dict[str, tuple[str, ...]] | None = option(
        "The fast paths of each component, exactly; a record has them.",
        group="Machine",
        python_only=True,
        person_only=True,
    )
    quantized: dict[str, str] | None = option(
        "The storage dtype of each component's weights, exactly; a record has it.",
        group="Machine",
        python_only=True,
        person_only=True,
    )
    method: LossyMethod | None = option(
        "The method of a record, whatever the quality leads to now.",
        python_only=True,
        person_only=True,
    )
    repairs: tuple[Repair, ...] | None = option(
        "The repairs to begin with, exactly; a record has them.",
        group="Machine",
        python_only=True,
        person_only=True,
    )

    family_options: dict[str, Any] = option(
        "Options of one family.", default={}, python_only=True, person_only=True
    )

    @field_validator(*SPELLED, mode="before")
    @classmethod
    def _to_text(cls, given: Any, info: ValidationInfo) -> Any:
        """Convert Python values to their command line text."""
        return option_text(str(info.field_name), given)

    @field_validator(*REPEATED, mode="before")
    @classmethod
    def _to_repeated(cls, given: Any, info: ValidationInfo) -> Any:
        """Accept one value, a list of them, or the forms that the option has besides."""
        return REPEATED[str(info.field_name)](given)

    @model_validator(mode="before")
    @classmethod
    def _collect_family_options(cls, values: Any) -> Any:
        """Collect unknown options as family options; the resolver refuses foreign ones."""
        values = with_current_names(values)
        own = {name: value for name, value in values.items() if name in cls.model_fields}
        rest = {name: value for name, value in values.items() if name not in cls.model_fields}
        if rest:
            own["family_options"] = {**own.get("family_options", {}), **rest}
        return own

    @model_validator(mode="after")
    def _check(self) -> Request:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.quantize not in QUANTIZE:
            hint = did_you_mean(self.quantize, QUANTIZE)
            raise InputError(
                f"quantize must be one of {', '.join(QUANTIZE)}, got {self.quantize!r}{hint}"
            )
        parse_parallel(self.parallel)
        parse_quality(self.quality)
        if self.devices is not None and self.device != "auto":
            raise InputError(f"device={self.device} and devices={self.devices}; give one of them")
        for name in ("max_memory", "max_host_memory"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name)
        check_sizes(self)
        if self.seconds is not None and self.num_frames is not None:
            raise InputError(
                f"num_frames={self.num_frames} and seconds={self.seconds:g} both set the length; "
                "give one of them"
            )
        if self.seed is not None and self.seed + self.num_videos - 1 > MAX_SEED:
            raise InputError(f"seed + num_videos must stay under {MAX_SEED + 1}, got {self.seed}")
        if self.latents is not None and (self.num_videos > 1 or self.chain > 1):
            raise InputError(
                "latents are the start noise of one clip; they can't be given with "
                f"num_videos={self.num_videos} and chain={self.chain}"
            )
        if self.image is not None and self.extend is not None:
            raise InputError("image and extend both give the first frames; give one of them")
        return self

    def asked_size(self) -> tuple[int, int] | None:
        """(height, width) in pixels if given as numbers."""
        if self.size is not None:
            return parse_size(self.size)
        if self.height is not None and self.width is not None:
            return self.height, self.width
        return None

    def asked_aspect(self) -> tuple[int, int] | None:
        """(width, height) of the aspect ratio, if given."""
        if self.aspect is None:
            return None
        width, height = self.aspect.split(":")
        return int(width), int(height)

    @property
    def num_ranks(self) -> int:
        """Number of devices that work together."""
        return len(self.devices.split(",")) if self.devices is not None else self.num_devices or 1

    def has_given_frames(self) -> bool:
        """Whether conditioning frames are given: a first or last image, or a video to extend."""
        return any(given is not None for given in (self.image, self.last_image, self.extend))
