"""Hold the product's parts against golden folders: ``python tests/golden/check.py FOLDER...``

A golden folder holds ``config.json``, ``io.safetensors`` (inputs and outputs) and, for models,
``weights.safetensors``; its README says how they came about. Its name begins with the part's kind
(`KINDS`; the longest that fits), whatever the sizes in it. The part is built by the product's code,
loaded strictly and run on the inputs; the largest absolute and relative error of each output is
printed. Exit status: 0 all within the limit, 1 some are not, 2 something can't be checked.

No arithmetic of its own but comparing, and the analytic fields that the samplers' READMEs give.
To add a kind: a function from `Golden` to named outputs, and a line in `KINDS`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everyframe.checkpoints.tensor_file import open_checkpoint
from everyframe.core.errors import EveryframeError, InputError
from everyframe.numerics.tensor_stats import Difference, largest_error
from everyframe.samplers import iddpm, rectified_flow
from everyframe.samplers.guidance import guide

# As a script or loaded by its test: the modules beside it.
sys.path.insert(0, str(Path(__file__).parent))
from golden_folder import Golden, Outputs, constructor
from opensora2_kinds import (
    opensora2_dcae,
    opensora2_mmdit,
    opensora2_sampler,
    opensora2_vae_hunyuan,
)


def opensora_stdit_v1_0(golden: Golden) -> Outputs:
    """One forward call of `STDiT`, with and without a text mask."""
    from everyframe.families.opensora.checkpoint import STDIT_KEYS
    from everyframe.families.opensora.config import STDiTConfig
    from everyframe.families.opensora.stdit import STDiT

    model = STDiT(STDiTConfig.from_json(constructor(golden)))
    golden.load(model, STDIT_KEYS)
    for name, mask in (("output", "mask"), ("output_without_mask", None)):
        if name in golden:
            context = model.context(golden["y"], golden[mask] if mask else None)
            yield name, model(golden["x"], golden["timestep"], context)


def opensora_stdit3_v1_2(golden: Golden) -> Outputs:
    """One forward call of `STDiT3`, with and without a frame mask."""
    from everyframe.families.opensora.checkpoint import STDIT3_KEYS
    from everyframe.families.opensora.config import STDiT3Config
    from everyframe.families.opensora.stdit3 import STDiT3

    model = STDiT3(STDiT3Config.from_json(constructor(golden)))
    golden.load(model, STDIT3_KEYS)
    # Upstream gives every sample the first one's pixels; a frame rate is each sample's own.
    sizes = {"fps": golden["fps"], "height": golden["height"][0], "width": golden["width"][0]}
    outputs = (
        ("output", True, False),
        ("output_with_x_mask", True, True),
        ("output_without_mask", False, False),
    )
    for name, text_mask, frame_mask in outputs:
        if name in golden:
            context = model.context(golden["y"], golden["mask"] if text_mask else None)
            x_mask = golden["x_mask"].bool() if frame_mask else None
            yield name, model(golden["x"], golden["timestep"], context, x_mask=x_mask, **sizes)


def opensora_vae_temporal_v1_2(golden: Golden) -> Outputs:
    """Both directions of the temporal autoencoder."""
    from everyframe.families.opensora.temporal_vae import TemporalVAE
    from everyframe.families.opensora.vae_config import TemporalVAEConfig

    vae = TemporalVAE(TemporalVAEConfig.from_json(constructor(golden)))
    golden.load(vae)
    yield "moments", torch.cat(vae.moments(golden["x"]), dim=1)
    yield "z", vae.encode(golden["x"])
    yield "reconstruction", vae.decode(golden["z"], num_frames=golden["x"].shape[2])


#: What both of Open-Sora's samplers have where a config says nothing.
_CFG_SCALE = 4.0


def opensora_iddpm(golden: Golden) -> Outputs:
    """A whole run of 1.0's sampler on the analytic model of its README."""
    for name, supported in (
        ("noise_schedule", "linear"), ("learn_sigma", True), ("predict_xstart", False),
    ):  # fmt: skip
        golden.only(name, supported)
    num_timesteps = golden.config.get("diffusion_steps", 1000)
    plan = iddpm.schedule(_iddpm_steps(golden, num_timesteps), num_timesteps=num_timesteps)
    scale = golden.config.get("cfg_scale", _CFG_SCALE)

    def model(x: Tensor, t: Tensor, c: float) -> Tensor:
        tt = (t / 1000).view(-1, 1, 1, 1, 1)
        return torch.cat([torch.tanh(x * (0.7 + 0.2 * tt) + 0.1 * c), 0.5 * torch.sin(x)], dim=1)

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        return guide(model(x, t, 1.0), model(x, t, -1.0), scale, channels=3)

    z0, noise = golden["z0"], golden["noise"]
    # The golden's batch is doubled; its second half is the unconditional one and is thrown away.
    *_, last = iddpm.sample(denoise, z0, plan, lambda step: noise[step, : len(z0)])
    yield "timestep_map", plan.timestep_map
    yield "betas", plan.betas
    yield "sample", last.x


def _iddpm_steps(golden: Golden, num_timesteps: int) -> int:
    """Steps of one even section: a number, its text as a respacing, or by default all of them."""
    steps = golden.config.get("num_sampling_steps")
    respacing = golden.config.get("timestep_respacing") or num_timesteps
    if steps is None and str(respacing).isdecimal():
        return int(respacing)
    golden.only("timestep_respacing", None)
    return int(golden.setting("num_sampling_steps"))


def opensora_rflow(golden: Golden) -> Outputs:
    """A whole run of 1.2's sampler on the analytic velocity of its README."""
    golden.only("use_discrete_timesteps", False)
    num_timesteps = golden.config.get("num_timesteps", 1000)
    sizes: dict[str, Any] = {}
    if golden.config.get("use_timestep_transform", False):
        sizes["resolution"] = (golden["height"], golden["width"])
        sizes["num_frames"] = golden["num_frames"]
    timesteps = rectified_flow.schedule(
        golden.config.get("num_sampling_steps", 10), num_timesteps=num_timesteps, **sizes
    )
    scale = golden.config.get("cfg_scale", _CFG_SCALE)

    def model(x: Tensor, t: Tensor, c: float) -> Tensor:
        q = (t / 1000).view(-1, 1, 1, 1, 1)
        return torch.sin(x) * (1 - q) + 0.2 * c * torch.cos(x + q)

    def denoise(x: Tensor, t: Tensor, x_mask: Tensor | None = None) -> Tensor:
        return guide(model(x, t, 1.0), model(x, t, -1.0), scale)

    z0 = golden["z0"]
    if "mask" in golden:
        *_, last = rectified_flow.sample_masked(
            denoise,
            z0,
            timesteps,
            golden["mask"],
            lambda step: golden["noise"][step],
            num_timesteps=num_timesteps,
        )
    else:
        *_, last = rectified_flow.sample(denoise, z0, timesteps, num_timesteps=num_timesteps)
    yield "sample", last.x


def _other_way(x: Tensor) -> Tensor:
    """Step-Video's (B, T, C, H, W) to ours, (B, C, T, H, W), and back."""
    return x.transpose(1, 2)


def stepvideo_dit(golden: Golden) -> Outputs:
    """One forward call of Step-Video's denoiser."""
    from everyframe.families.stepvideo.config import StepVideoModelConfig
    from everyframe.families.stepvideo.model import StepVideoModel

    given = constructor(golden)
    if "rope_ch_split" in golden.config:
        given["rope_ch_split"] = golden.setting("rope_ch_split")
    model = StepVideoModel(StepVideoModelConfig.from_json(given))
    golden.load(model)
    # A model may do without CLIP, and then upstream ignores what it is given of that.
    clip = golden["encoder_hidden_states_2"] if len(model.config.caption_channels) == 2 else None
    context = model.context(golden["encoder_hidden_states"], clip, golden["encoder_attention_mask"])
    x = _other_way(golden["hidden_states"])
    yield "output", _other_way(model(x, golden["timestep"], context))


def stepvideo_vae(golden: Golden) -> Outputs:
    """Both directions of Step-Video's autoencoder, for every video and every latent."""
    from everyframe.families.stepvideo.vae import StepVAE
    from everyframe.families.stepvideo.vae_config import StepVAEConfig

    weights = open_checkpoint(golden.folder / "weights.safetensors")
    sizes = StepVAEConfig.from_shapes({name: weights.shape(name) for name in weights})
    # Shapes do not say these three; upstream has them fixed.
    names = {
        "frame_len": "frame_len",
        "latent_len": "latent_len",
        "group_norm_groups": "num_groups",
    }
    given = {names[key]: golden.config[key] for key in names if key in golden.config}
    vae = StepVAE(replace(sizes, **given))
    golden.load(vae)
    for name in golden.tensors:
        kind, _, case = name.partition("_")
        if kind == "video":
            video = _other_way(golden[name])
            mean, log_variance = (_other_way(each) for each in vae.moments(video))
            yield f"moments_{case}", _other_way(vae.run_encoder(video))
            yield f"mean_{case}", mean
            yield f"logvar_{case}", log_variance
            yield f"std_{case}", torch.exp(0.5 * log_variance)
            if f"noise_{case}" in golden:
                noise = _other_way(golden[f"noise_{case}"])
                yield f"sample_{case}", _other_way(vae.encode(video, noise))
        elif kind == "latent":
            latents = _other_way(golden[name])
            apart = torch.cat(list(vae.decode_pieces(latents)), dim=2)
            yield f"decoded_{case}_before_mix", _other_way(apart)
            yield f"decoded_{case}", _other_way(vae.decode(latents))


def stepvideo_llm(golden: Golden) -> Outputs:
    """Step-LLM on the tokens of every row, and what its tokenizer puts around them."""
    from everyframe.families.stepvideo.config import StepLLMConfig
    from everyframe.families.stepvideo.llm import StepLLM, slopes
    from everyframe.families.stepvideo.text import with_special_tokens

    model = StepLLM(StepLLMConfig.from_json(constructor(golden)))
    golden.load(model)
    yield "hidden_states", model(golden["input_ids"])
    yield "alibi_slopes", slopes(model.config.num_attention_heads)
    if "raw_token_ids" in golden.config:
        length = golden.setting("max_length")
        rows = [with_special_tokens(ids, length) for ids in golden.setting("raw_token_ids")]
        yield "input_ids", torch.cat([row.ids for row in rows])
        yield "attention_mask", torch.cat([row.mask for row in rows]).long()


def stepvideo_rope(golden: Golden) -> Outputs:
    """Rotations along frames, rows and columns, and their tables."""
    from everyframe.ops.rope import axes_table, axis_angles, rotate_axes

    theta = constructor(golden).get("freq", 10000.0)
    for case in golden.setting("cases"):
        tag, sizes, widths = case["tag"], case["rope_positions"], case["ch_split"]
        table = axes_table(sizes, widths, theta=theta)
        rotated = rotate_axes(golden[f"{tag}.q"].transpose(1, 2), table)
        yield f"{tag}.q_rotated", rotated.transpose(1, 2)
        for width in sorted(set(widths)):
            angles = axis_angles(torch.arange(max(sizes)), width, theta).repeat(1, 2)
            yield f"{tag}.cos_{width}", angles.cos()
            yield f"{tag}.sin_{width}", angles.sin()


def stepvideo_scheduler(golden: Golden) -> Outputs:
    """Whole runs of Step-Video's sampler on the velocity of its README."""
    from everyframe.samplers import flow_matching

    start = golden["sample_start"]
    for case in golden.setting("cases"):
        tag = case["tag"]
        steps, shift = case["num_inference_steps"], case["time_shift"]
        sigmas = flow_matching.schedule(steps, shift, reverse=case.get("reverse", False))
        yield f"{tag}.sigmas", sigmas
        yield f"{tag}.timesteps", sigmas[:-1]

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return torch.sin(x) + 0.1 * t.view(-1, *[1] * (x.ndim - 1))

        states = [step.x for step in flow_matching.sample(velocity, start, sigmas)]
        yield f"{tag}.trajectory", torch.stack([start, *states])
        yield f"{tag}.sample_final", states[-1]


@dataclass(frozen=True)
class Kind:
    """How a part is run, and how far off it may be: one limit is finite."""

    run: Callable[[Golden], Outputs]
    absolute: float = math.inf
    relative: float = math.inf

    def accepts(self, error: Difference) -> bool:
        return error.absolute <= self.absolute and error.relative <= self.relative


# One forward call differs by float32 rounding in another order: 2e-4 is far above that and far
# below a wrong formula. A sampler multiplies such differences over its steps, and its values may
# grow to hundreds under guidance, so it is held against the largest value.
KINDS = {
    "opensora_stdit_v1_0": Kind(opensora_stdit_v1_0, absolute=2e-4),
    "opensora_stdit3_v1_2": Kind(opensora_stdit3_v1_2, absolute=2e-4),
    "opensora_vae_temporal_v1_2": Kind(opensora_vae_temporal_v1_2, absolute=2e-4),
    "opensora_iddpm": Kind(opensora_iddpm, relative=1e-3),
    "opensora_rflow": Kind(opensora_rflow, relative=1e-3),
    "stepvideo_dit": Kind(stepvideo_dit, absolute=2e-4),
    "stepvideo_dit_4heads": Kind(stepvideo_dit, absolute=2e-4),
    # Pixels and log-variances of the autoencoder's random weights reach tens.
    "stepvideo_vae": Kind(stepvideo_vae, absolute=1e-3),
    "stepvideo_llm": Kind(stepvideo_llm, absolute=2e-4),
    "stepvideo_rope": Kind(stepvideo_rope, absolute=2e-4),
    "stepvideo_scheduler": Kind(stepvideo_scheduler, absolute=2e-4),
    # Also opensora2_mmdit_cond and opensora2_mmdit_flux: the config tells them apart.
    "opensora2_mmdit": Kind(opensora2_mmdit, absolute=2e-4),
    "opensora2_vae_hunyuan": Kind(opensora2_vae_hunyuan, absolute=1e-3),
    "opensora2_dcae": Kind(opensora2_dcae, absolute=1e-3),
    "opensora2_sampler": Kind(opensora2_sampler, relative=1e-3),
}


def kind_of(folder: Path) -> Kind:
    """The kind with the longest name that the folder's name begins with."""
    name = folder.resolve().name
    fitting = [kind for kind in KINDS if name.startswith(kind)]
    if not fitting:
        raise InputError(f"{folder}: the name must begin with one of {', '.join(KINDS)}")
    return KINDS[max(fitting, key=len)]


def check(folder: Path) -> bool:
    """Run one folder and print a line an output; false if one is beyond its limit.

    A folder may hold fewer outputs than its kind can give, but not none.
    """
    kind, golden = kind_of(folder), Golden(folder)
    within, checked = True, set[str]()
    print(f"{folder.resolve().name}")
    with torch.inference_mode():
        for name, got in kind.run(golden):
            if name not in golden:
                continue
            want = golden[name]
            checked.add(name)
            if got.shape != want.shape:
                print(f"  {name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}  WRONG")
                within = False
                continue
            error = largest_error(got, want)
            accepted = kind.accepts(error)
            print(f"  {name}: {error}{'' if accepted else '  TOO FAR'}")
            within &= accepted
    if not checked:
        raise InputError(f"{folder / 'io.safetensors'} has none of the outputs of its kind")
    return within


def main(arguments: list[str] | None = None) -> int:
    """Check every folder, also after one that failed; the exit status is the worst of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    status = 0
    for folder in parser.parse_args(arguments).folders:
        try:
            status = max(status, 0 if check(folder) else 1)
        except (EveryframeError, OSError) as error:
            print(f"{folder.name}: {error}", file=sys.stderr)
            status = 2
        except Exception as error:
            print(f"{folder.name}: {type(error).__name__}: {error}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main())
