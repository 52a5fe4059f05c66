"""Kinds of golden folders of Open-Sora 2.0; see `check.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from golden_folder import Golden, Outputs, constructor, refuse_other
from torch import Tensor

from everyframe.core.errors import InputError


def opensora2_mmdit(golden: Golden) -> Outputs:
    """Forward calls of Open-Sora 2.0's denoiser and of FLUX: with and without a condition."""
    from everyframe.families.opensora2.config import MMDiTConfig
    from everyframe.families.opensora2.mmdit import MMDiT

    config = MMDiTConfig.from_json(constructor(golden))
    model = MMDiT(config)
    golden.load(model)
    guidance = golden["guidance"] if config.guidance_embed else None
    context = model.context(golden["txt"], golden["y_vec"], guidance)
    patch = config.patch_size

    def unpacked(prefix: str, tokens: str = "img") -> Tensor:
        """Latents of tokens, whose ids count frames, rows and columns."""
        t, h, w = (int(n) + 1 for n in golden[f"{prefix}img_ids"][0].amax(0))
        sizes = {"t": t, "h": h, "w": w, "ph": patch, "pw": patch}
        pattern = "b (t h w) (c ph pw) -> b c t (h ph) (w pw)"
        return rearrange(golden[f"{prefix}{tokens}"], pattern, **sizes)

    def packed(x: Tensor) -> Tensor:
        return rearrange(x, "b c t (h ph) (w pw) -> b (t h w) (c ph pw)", ph=patch, pw=patch)

    x, t = unpacked(""), golden["timesteps"]
    cond = None
    if "masks" in golden:
        cond = torch.cat([golden["masks"], golden["masked_ref"]], dim=1)
    elif "cond" in golden:
        cond = unpacked("", "cond")
    velocity = model(x, t, context, cond)
    yield "output", packed(velocity)
    yield "output_unpacked", velocity
    if "output_cond_zero" in golden:
        yield "output_cond_zero", packed(model(x, t, context))
    if "image.output" in golden:
        yield "image.output", packed(model(unpacked("image."), t, context))


_HUNYUAN_ALWAYS: dict[str, object] = {
    "act_fn": "silu", "mid_block_add_attention": True, "time_compression_ratio": 4,
    "spatial_compression_ratio": 8, "dropout": 0.0, "channel": False, "from_pretrained": None,
}  # fmt: skip


def opensora2_vae_hunyuan(golden: Golden) -> Outputs:
    """Both directions of HunyuanVideo's autoencoder, in the tiles of each case."""
    from everyframe.families.opensora2 import vae as vaes
    from everyframe.families.opensora2.vae_config import HunyuanVAEConfig

    given = constructor(golden)
    for name, supported in _HUNYUAN_ALWAYS.items():
        refuse_other(golden.folder, given, name, supported)
    # Of how it runs; each case says it.
    unused = (*_HUNYUAN_ALWAYS, "use_slicing", "use_spatial_tiling", "use_temporal_tiling")
    given = {name: value for name, value in given.items() if name not in unused}
    # Upstream's names; what isn't named is as released.
    names = {"sample_tsize": "sample_frames", "tile_overlap_factor": "overlap"}
    fields = {names.get(name, name): value for name, value in given.items()}
    if "block_out_channels" in fields:
        fields["block_out_channels"] = tuple(fields["block_out_channels"])
    config = HunyuanVAEConfig(**fields)
    vae = vaes.build(config)
    golden.load(vae)
    for case in golden.setting("cases"):
        name = case["name"]
        tiled = replace(
            config, tiles_sides=case["spatial_tiling"], tiles_frames=case["temporal_tiling"]
        )
        moments = vaes.run_encoder(vae, tiled, golden[f"video_{name}"])
        yield f"moments_{name}", moments
        yield f"z_{name}", vaes.encode(vae, tiled, golden[f"video_{name}"])
        if f"noise_{name}" in golden:
            mean, log_variance = moments.chunk(2, dim=1)
            drawn = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * golden[f"noise_{name}"]
            yield f"z_drawn_{name}", (drawn - config.shift_factor) * config.scale_factor
        if f"latent_{name}" in golden:
            yield f"decoded_{name}", vaes.decode(vae, tiled, golden[f"latent_{name}"])


def opensora2_dcae(golden: Golden) -> Outputs:
    """Both directions of the video DC-AE, in the tiles of each case."""
    from everyframe.families.opensora2 import vae as vaes
    from everyframe.families.opensora2.vae_config import DCAEConfig

    given = constructor(golden)
    if given["temporal_downsample"] != given["temporal_upsample"]:
        raise InputError(f"{golden.folder}: time must be halved where it is doubled")
    if given["encoder_block_type"] != given["decoder_block_type"]:
        raise InputError(f"{golden.folder}: encoder and decoder must have the same blocks")
    config = DCAEConfig(
        in_channels=given["in_channels"],
        latent_channels=given["latent_channels"],
        widths=tuple(given["width_list"]),
        encoder_depths=tuple(given["encoder_depth_list"]),
        decoder_depths=tuple(given["decoder_depth_list"]),
        attention=tuple(kind != "ResBlock" for kind in given["encoder_block_type"]),
        time=tuple(given["temporal_downsample"]),
        scale_factor=given.get("scaling_factor") or 1.0,
        sample_size=given.get("spatial_tile_size", 256),
        sample_frames=given.get("temporal_tile_size", 32),
        overlap=given.get("tile_overlap_factor", 0.25),
    )
    vae = vaes.build(config)
    golden.load(vae)
    for case in golden.setting("cases"):
        name = case["name"]
        tiled = replace(
            config, tiles_sides=case["spatial_tiling"], tiles_frames=case["temporal_tiling"]
        )
        if f"video_{name}" in golden:
            yield f"z_{name}", vaes.encode(vae, tiled, golden[f"video_{name}"])
        if f"latent_{name}" in golden:
            yield f"decoded_{name}", vaes.decode(vae, tiled, golden[f"latent_{name}"])


def opensora2_sampler(golden: Golden) -> Outputs:
    """Whole runs of Open-Sora 2.0's sampler on the analytic velocity of its README."""
    for case in golden.setting("cases"):
        yield from _opensora2_case(golden, case)


def _opensora2_case(golden: Golden, case: dict[str, Any]) -> Outputs:
    from everyframe.families.opensora2.conditions import GivenLatents
    from everyframe.families.opensora2.guidance import PROMPT, Guidance, time_shift
    from everyframe.samplers import flow_matching

    name, patch = case["name"], case["patch_size"]
    z0 = golden[f"{name}.z0"]
    frames, rows, columns = z0.shape[2], z0.shape[3] // patch, z0.shape[4] // patch
    shift = time_shift(rows * columns, frames) if case["shift"] else 1.0
    if case["shift"] and case["flow_shift"] is not None:
        shift = case["flow_shift"]
    times = flow_matching.schedule(case["num_steps"], shift, reverse=True)
    yield f"{name}.timesteps", times
    yield f"{name}.model_timesteps", times[:-1].float()

    given = _given(golden, case)
    # Upstream has no condition for a single frame, but writes the given one over it.
    seen = given if frames > 1 else [GivenLatents()] * len(given)
    cond = torch.cat([each.condition(tuple(z0.shape[1:])) for each in seen])
    yield f"{name}.masks", cond[:, :1]
    yield f"{name}.masked_ref", cond[:, 1:]

    grid = torch.meshgrid(*map(torch.arange, (frames, rows, columns)), indexing="ij")
    places = sum(weight * each for weight, each in zip((0.7, 0.4, 0.2), grid, strict=True))
    assert isinstance(places, Tensor)
    wave = 0.1 * torch.sin(places).repeat_interleave(patch, 1).repeat_interleave(patch, 2)

    def model(x: Tensor, t: Tensor, c: float, mask: Tensor, ref: Tensor) -> Tensor:
        t = t.view(-1, 1, 1, 1, 1)
        return torch.sin(x) * (1 - t) + 0.2 * c * torch.cos(x + t) + wave + 0.3 * mask * (ref - x)

    guidance = Guidance(
        case["num_steps"], case["guidance"], case["guidance_img"], case["text_osci"],
        case["image_osci"], case["scale_temporal_osci"] and "i2v" in case["cond_type"],
        bool(cond.any()),
    )  # fmt: skip

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        if case["method"] == "distill":
            nothing = torch.zeros(())
            return model(x, t, 1.0, nothing, nothing) + 0.05 * case["guidance"]
        step = int((times - t[0]).abs().argmin())
        now, outputs = guidance.at(step, frames), []
        for row, has_condition in now.branches:
            given_guidance = (
                1.0 if (row, has_condition) == PROMPT else -float(case["negative_prompt"])
            )
            here = cond if has_condition else torch.zeros_like(cond)
            outputs.append(model(x, t, given_guidance, here[:, :1], here[:, 1:]))
        return now.combine(outputs)

    *_, last_step = flow_matching.sample(denoise, z0, times)
    yield f"{name}.sample", last_step.x
    # Upstream writes the given frames over those of the first video alone.
    pasted = torch.cat([given[0].paste(last_step.x[:1]), last_step.x[1:]])
    yield f"{name}.sample_pasted", pasted


def _given(golden: Golden, case: dict[str, Any]) -> list[Any]:
    """Latents that each video of the case begins and ends with, as much as its kind reads."""
    from everyframe.families.opensora2.conditions import GivenLatents

    name, kind = case["name"], case["cond_type"]
    given = [GivenLatents() for _ in golden[f"{name}.z0"]]
    if kind == "t2v" or f"{name}.references_0" not in golden:
        return given
    refs = [golden[f"{name}.references_{i}"] for i in range(2 if "loop" in kind else 1)]
    length = 1
    if "v2v" in kind:
        length = (16 if "easy" in kind else 8) + case["is_causal_vae"]
    for item in range(len(given) - bool(case.get("no_reference_for_last"))):
        at = slice(item, item + 1)
        first = None if "tail" in kind else refs[0][at, :, :length]
        last = refs[-1][at, :, -length:] if "tail" in kind or "loop" in kind else None
        given[item] = GivenLatents(first, last)
    return given
