"""diffusers' FLUX transformer with the weights of an `MMDiT`, as an independent denoiser.

Rotary halves become neighbouring pairs, and the condition's linear layer is concatenated with that
of the latents.
"""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel
from einops import rearrange
from torch import Tensor

from everyframe.families.opensora2.config import MMDiTConfig

State = dict[str, Tensor]


def flux_of(config: MMDiTConfig, state: State) -> FluxTransformer2DModel:
    """diffusers' class with these weights, loaded strictly."""
    cond = config.in_channels + config.patch_size**2 if config.cond_embed else 0
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=config.in_channels + cond,
        out_channels=config.in_channels,
        num_layers=config.depth,
        num_single_layers=config.depth_single_blocks,
        attention_head_dim=config.head_size,
        num_attention_heads=config.num_heads,
        joint_attention_dim=config.context_in_dim,
        pooled_projection_dim=config.vec_in_dim,
        guidance_embeds=config.guidance_embed,
        axes_dims_rope=tuple(config.axes_dim),
    )
    model.load_state_dict(renamed(config, state))
    return model.to(next(iter(state.values())).dtype).eval()


def velocity(
    model: FluxTransformer2DModel,
    config: MMDiTConfig,
    x: Tensor,
    t: Tensor,
    text: Tensor,
    vector: Tensor,
    cond: Tensor | None = None,
    guidance: Tensor | None = None,
) -> Tensor:
    """Its answer for latents (B, C, T, H, W)."""
    p = config.patch_size
    pack = "b c t (h ph) (w pw) -> b (t h w) (c ph pw)"
    tokens = rearrange(x, pack, ph=p, pw=p)
    if cond is not None:
        tokens = torch.cat([tokens, rearrange(cond, pack, ph=p, pw=p)], -1)
    grid = (x.shape[2], x.shape[3] // p, x.shape[4] // p)
    ids = torch.cartesian_prod(*(torch.arange(n).to(x.dtype) for n in grid))
    (out,) = model(
        hidden_states=tokens, encoder_hidden_states=text, pooled_projections=vector, timestep=t,
        img_ids=ids, txt_ids=torch.zeros(text.shape[1], 3, dtype=x.dtype),
        guidance=guidance, return_dict=False,
    )  # fmt: skip
    sizes = {"t": grid[0], "h": grid[1], "w": grid[2], "ph": p, "pw": p}
    return rearrange(out, "b (t h w) (c ph pw) -> b c t (h ph) (w pw)", **sizes)


def renamed(config: MMDiTConfig, state: State) -> State:
    """Upstream's tensors under diffusers' names."""
    given, made = dict(state), State()

    def move(source: str, target: str) -> None:
        for kind in ("weight", "bias"):
            if f"{source}.{kind}" in given:
                made[f"{target}.{kind}"] = given.pop(f"{source}.{kind}")

    def qkv(source: tuple[str, str, str], fused: str, targets: tuple[str, ...], *rest: int) -> None:
        for kind in ("weight", "bias"):
            if f"{fused}.{kind}" in given:
                parts = list(given.pop(f"{fused}.{kind}").split((config.hidden_size,) * 3 + rest))
            elif f"{source[0]}.{kind}" in given:
                parts = [given.pop(f"{name}.{kind}") for name in source]
                parts[2:] = parts[2].split((config.hidden_size, *rest)) if rest else parts[2:]
            else:
                continue
            for index, (target, part) in enumerate(zip(targets, parts, strict=True)):
                made[f"{target}.{kind}"] = paired(config, part) if index < 2 else part

    def norms(source: str, q: str, k: str) -> None:
        for name, target in (("query_norm", q), ("key_norm", k)):
            made[f"{target}.weight"] = paired(config, given.pop(f"{source}.{name}.scale"))

    move("img_in", "x_embedder")
    if config.cond_embed:
        weight = torch.cat([made["x_embedder.weight"], given.pop("cond_in.weight")], 1)
        made["x_embedder.weight"] = weight
        made["x_embedder.bias"] = made["x_embedder.bias"] + given.pop("cond_in.bias")
    move("txt_in", "context_embedder")
    for ours, theirs in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance")):
        move(f"{ours}_in.in_layer", f"time_text_embed.{theirs}_embedder.linear_1")
        move(f"{ours}_in.out_layer", f"time_text_embed.{theirs}_embedder.linear_2")
    for i in range(config.depth):
        a, b = f"double_blocks.{i}", f"transformer_blocks.{i}"
        for stream, norm, ff in (("img", "norm1", "ff"), ("txt", "norm1_context", "ff_context")):
            move(f"{a}.{stream}_mod.lin", f"{b}.{norm}.linear")
            move(f"{a}.{stream}_mlp.0", f"{b}.{ff}.net.0.proj")
            move(f"{a}.{stream}_mlp.2", f"{b}.{ff}.net.2")
            attn = f"{a}.{stream}_attn"
            names = ("to_q", "to_k", "to_v") if stream == "img" else (
                "add_q_proj", "add_k_proj", "add_v_proj")  # fmt: skip
            own = (f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj")
            qkv(own, f"{attn}.qkv", tuple(f"{b}.attn.{name}" for name in names))
            added = "" if stream == "img" else "added_"
            norms(f"{attn}.norm", f"{b}.attn.norm_{added}q", f"{b}.attn.norm_{added}k")
        move(f"{a}.img_attn.proj", f"{b}.attn.to_out.0")
        move(f"{a}.txt_attn.proj", f"{b}.attn.to_add_out")
    for i in range(config.depth_single_blocks):
        a, b = f"single_blocks.{i}", f"single_transformer_blocks.{i}"
        move(f"{a}.modulation.lin", f"{b}.norm.linear")
        move(f"{a}.linear2", f"{b}.proj_out")
        own = (f"{a}.q_proj", f"{a}.k_proj", f"{a}.v_mlp")
        targets = (f"{b}.attn.to_q", f"{b}.attn.to_k", f"{b}.attn.to_v", f"{b}.proj_mlp")
        qkv(own, f"{a}.linear1", targets, config.mlp_size)
        norms(f"{a}.norm", f"{b}.attn.norm_q", f"{b}.attn.norm_k")
    move("final_layer.linear", "proj_out")
    for kind in ("weight", "bias"):
        shift, scale = given.pop(f"final_layer.adaLN_modulation.1.{kind}").chunk(2)
        made[f"norm_out.linear.{kind}"] = torch.cat([scale, shift])
    assert not given, f"without a place: {sorted(given)}"
    return made


def paired(config: MMDiTConfig, rows: Tensor) -> Tensor:
    """Rows of each head from halves to neighbouring pairs."""
    if not config.use_liger_rope:
        return rows
    halves = rows.unflatten(0, (-1, 2, config.head_size // 2))
    return halves.transpose(1, 2).flatten(0, 2)
