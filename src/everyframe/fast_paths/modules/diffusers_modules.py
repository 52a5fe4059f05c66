"""Subclasses of diffusers' modules that compute by our kernels; see `cpu_modules`.

Imported only for a model that has such modules, as diffusers takes a while.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.activations import GEGLU, GELU
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import (
    CogVideoXCausalConv3d,
    CogVideoXSpatialNorm3D,
)
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import (
    HunyuanVideoCausalConv3d,
    HunyuanVideoResnetBlockCausal3D,
)
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    HunyuanVideo15CausalConv3d,
    HunyuanVideo15RMS_norm,
)
from diffusers.models.autoencoders.autoencoder_kl_ltx import LTXVideoCausalConv3d
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import (
    LTX2VideoCausalConv3d,
    PerChannelRMSNorm,
)
from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiChunkedGroupNorm3D
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm
from diffusers.models.normalization import FP32LayerNorm, RMSNorm
from diffusers.models.resnet import AlphaBlender, ResnetBlock2D, TemporalResnetBlock
from torch import Tensor, nn

from everyframe.fast_paths.modules.convolution_modules import WinogradConv3d
from everyframe.fast_paths.modules.cpu_modules import NativeTorchGroupNorm
from everyframe.fast_paths.modules.residual_blocks import NAMES
from everyframe.ops.native import kernels
from everyframe.ops.native.convolutions import Padding


class NativeGEGLU(GEGLU):  # type: ignore[misc]
    """diffusers' projection with a gated GELU after it."""

    is_plain = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = self.proj(hidden_states)
        if not self.is_plain and kernels.supports(x):
            return kernels.geglu(x)
        value, gate = x.chunk(2, dim=-1)
        plain: Tensor = value * self.gelu(gate)
        return plain


class NativeProjectedGELU(GELU):  # type: ignore[misc]
    """diffusers' projection with a GELU after it."""

    is_plain = False

    def gelu(self, gate: Tensor) -> Tensor:
        """The activation alone."""
        if not self.is_plain and kernels.supports(gate):
            return kernels.gelu(gate, self.approximate)
        plain: Tensor = super().gelu(gate)
        return plain


class NativeFP32LayerNorm(FP32LayerNorm):  # type: ignore[misc]
    """diffusers' layer norm with statistics in float32."""

    is_plain = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.is_plain or len(self.normalized_shape) > 1 or not kernels.supports(inputs):
            plain: Tensor = super().forward(inputs)
            return plain
        return kernels.layer_norm(inputs, self.weight, self.bias, self.eps)


class NativeDiffusersRMSNorm(RMSNorm):  # type: ignore[misc]
    """diffusers' RMS norm; with a weight of another dtype, or of two dimensions, its own code."""

    is_plain = False
    has_silu = False

    def forward(self, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.weight
        suits = len(self.dim) == 1 and (weight is None or weight.dtype == x.dtype)
        if self.is_plain or not suits or not kernels.supports(x):
            plain: Tensor = super().forward(x)
            return F.silu(plain) if self.has_silu else plain
        made = kernels.layer_norm(x, weight, self.bias, self.eps, is_rms=True)
        return F.silu(made, inplace=True) if self.has_silu else made


class _NativeChannelNorm(nn.Module):
    """An RMS norm over the channels of images; the result lies channels last."""

    channel_first: bool
    gamma: Tensor
    bias: Tensor | float
    is_plain = False
    has_silu = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gamma
        suits = self.channel_first and x.dtype == weight.dtype and kernels.supports(x)
        if self.is_plain or not suits:
            plain: Tensor = super().forward(x)
            return F.silu(plain) if self.has_silu else plain
        bias = self.bias if isinstance(self.bias, Tensor) else None
        # It divides by the norm, of 1e-12 at least, times the root of the number of channels.
        least = 1e-24 / weight.numel()
        rows = kernels.layer_norm(x.movedim(1, -1), weight, bias, least, is_rms=True)
        return (F.silu(rows, inplace=True) if self.has_silu else rows).movedim(-1, 1)


class NativeWanRMSNorm(_NativeChannelNorm, WanRMS_norm):  # type: ignore[misc]
    """The RMS norm of Wan's autoencoder."""


class NativeHunyuanVideo15RMSNorm(_NativeChannelNorm, HunyuanVideo15RMS_norm):  # type: ignore[misc]
    """The RMS norm of HunyuanVideo 1.5's autoencoder."""


class NativePerChannelRMSNorm(PerChannelRMSNorm):  # type: ignore[misc]
    """The RMS norm of LTX-2's autoencoder, without weights."""

    is_plain = False
    has_silu = False

    def forward(self, x: Tensor, channel_dim: int | None = None) -> Tensor:
        axis = self.channel_dim  # as in diffusers, whatever the call says
        if self.is_plain or not kernels.supports(x):
            plain: Tensor = super().forward(x, channel_dim)
            return F.silu(plain) if self.has_silu else plain
        rows = kernels.layer_norm(x.movedim(axis, -1), None, None, self.eps, is_rms=True)
        return (F.silu(rows, inplace=True) if self.has_silu else rows).movedim(-1, axis)


class NativeChunkedGroupNorm3D(MochiChunkedGroupNorm3D):  # type: ignore[misc]
    """Mochi's group norm of single frames, which needs no pieces to save memory."""

    is_plain = False
    has_silu = False

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm_layer
        if self.is_plain or not isinstance(norm, NativeTorchGroupNorm) or not norm.suits(x):
            plain: Tensor = super().forward(x)
            return F.silu(plain) if self.has_silu else plain
        made: Tensor = norm(x.transpose(1, 2).flatten(0, 1), has_silu=self.has_silu)
        return torch.unflatten(made, 0, (len(x), -1)).transpose(1, 2)


class NativeSpatialNorm3D(CogVideoXSpatialNorm3D):  # type: ignore[misc]
    """CogVideoX's group norm, scaled and shifted by layers of the latents.

    The layers see single pixels, so they compute small maps of the latents, and the norm reads
    these at the place of each of its pixels.
    """

    is_plain = False
    has_silu = False

    def forward(
        self, f: Tensor, zq: Tensor, conv_cache: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        norm, layers = self.norm_layer, (self.conv_y.conv, self.conv_b.conv)
        is_native = isinstance(norm, NativeTorchGroupNorm) and norm.suits(f)
        # The latents may be wider: what casts them to the layers' dtype is a hook of those.
        if self.is_plain or not is_native or any(each.weight.dtype != f.dtype for each in layers):
            plain, new_cache = super().forward(f, zq, conv_cache)
            return F.silu(plain) if self.has_silu else plain, new_cache
        scale, shift = (layer(zq) for layer in layers)
        numbers = torch.arange(zq[0, 0].numel(), dtype=torch.float64).view(1, 1, *zq.shape[2:])
        by = kernels.NormMap(scale, shift, _enlarge(numbers, f).long())
        # Layers of one frame don't read what is cached for them; diffusers has a copy for each.
        cache = dict.fromkeys(("conv_y", "conv_b"), _enlarge(zq, f))
        return norm(f, by, has_silu=self.has_silu), cache


def _enlarge(latents_NCTHW: Tensor, f: Tensor) -> Tensor:
    """The latents in the size of `f`; a first frame of an odd number is enlarged alone."""
    frames, *sides = f.shape[2:]
    if frames == 1 or frames % 2 == 0:
        return F.interpolate(latents_NCTHW, size=(frames, *sides))
    first = F.interpolate(latents_NCTHW[:, :, :1], size=(1, *sides))
    rest = F.interpolate(latents_NCTHW[:, :, 1:], size=(frames - 1, *sides))
    return torch.cat([first, rest], dim=2)


class WinogradWanConv3d(WinogradConv3d, WanCausalConv3d):  # type: ignore[misc]
    """Wan's causal convolution by Winograd's algorithm, without a padded copy of its input."""

    _padding: tuple[int, ...]  # pixels, then frames, of which the last are after the video

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:  # type: ignore[override]
        *_, frames, _ = self._padding
        history = cache_x if frames else None
        padding = Padding((frames, 0), self._padding[0], history=history)
        if self.suits(x, padding):
            return super().forward(x, padding=padding)
        plain: Tensor = super().forward(x, cache_x)
        return plain


class WinogradCogVideoXConv3d(CogVideoXCausalConv3d):  # type: ignore[misc]
    """The same for CogVideoX and Mochi, whose first frame stands for those before it."""

    is_plain = False

    def forward(
        self, inputs: Tensor, conv_cache: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        frames, is_of_mochi = self.time_kernel_size - 1, self.pad_mode == "replicate"
        padding = Padding(
            (frames, 0), self.height_pad, "replicate" if is_of_mochi else "zeros",
            None if is_of_mochi else conv_cache, repeats_frames=True,
        )  # fmt: skip
        if self.is_plain or not _suits(self.conv, inputs, padding):
            plain: tuple[Tensor, Tensor | None] = super().forward(inputs, conv_cache)
            return plain
        seen = None if is_of_mochi else _last(frames, inputs, padding.history)
        return self.conv(inputs, padding=padding), seen


class _PaddingConv3d(nn.Module):
    """The same of a module that pads the input of its `conv`."""

    conv: nn.Conv3d
    is_plain = False

    def padding_of(self, *args: Any, **kwargs: Any) -> Padding | None:
        """The padding in a call with these further arguments; None if `Padding` has none such."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        padding = None if self.is_plain else self.padding_of(*args, **kwargs)
        if padding is None or not _suits(self.conv, hidden_states, padding):
            plain: Tensor = super().forward(hidden_states, *args, **kwargs)
            return plain
        made: Tensor = self.conv(hidden_states, padding=padding)
        return made


class _ReplicatedConv3d(_PaddingConv3d):
    """Pixels and frames at the edge stand for those beyond it."""

    pad_mode: str
    time_causal_padding: tuple[int, ...]

    def padding_of(self) -> Padding | None:
        if self.pad_mode != "replicate":
            return None
        pad, *_, frames, _ = self.time_causal_padding
        return Padding((frames, 0), pad, "replicate", repeats_frames=True)


class WinogradHunyuanVideoConv3d(_ReplicatedConv3d, HunyuanVideoCausalConv3d):  # type: ignore[misc]
    """HunyuanVideo's."""


class WinogradHunyuanVideo15Conv3d(_ReplicatedConv3d, HunyuanVideo15CausalConv3d):  # type: ignore[misc]
    """HunyuanVideo 1.5's."""


class _LTXConv3d(_PaddingConv3d):
    """Frames at either end stand for those beyond it; pixels may be mirrored."""

    is_causal = True

    def padding_of(self, causal: bool | None = None) -> Padding | None:
        more = self.conv.kernel_size[0] - 1
        is_causal = self.is_causal if causal is None else causal
        frames = (more, 0) if is_causal else (more // 2, more // 2)
        pad = int(self.conv.padding[1])
        return Padding(frames, pad, self.conv.padding_mode, repeats_frames=True)


class WinogradLTXVideoConv3d(_LTXConv3d, LTXVideoCausalConv3d):  # type: ignore[misc]
    """LTX's: the module says whether it is causal."""


class WinogradLTX2VideoConv3d(_LTXConv3d, LTX2VideoCausalConv3d):  # type: ignore[misc]
    """LTX-2's: each call says whether it is causal."""


class WinogradHunyuanVideoBlock(HunyuanVideoResnetBlockCausal3D):  # type: ignore[misc]
    """A residual block that leaves images as rows of channels, as its convolutions make them."""

    is_plain = False
    norms_of_silu = NAMES

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.is_plain or not kernels.supports(hidden_states):
            plain: Tensor = super().forward(hidden_states)
            return plain
        x = self.conv1(self.nonlinearity(self.norm1(hidden_states)))
        x = self.conv2(self.dropout(self.nonlinearity(self.norm2(x))))
        shortcut = self.conv_shortcut
        return _sum(x, hidden_states if shortcut is None else shortcut(hidden_states))


class InPlaceResnetBlock2D(ResnetBlock2D):  # type: ignore[misc]
    """A residual block that adds to what its convolutions have made, where it lies."""

    is_plain = False

    def forward(self, input_tensor: Tensor, temb: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if self.is_plain or args or kwargs or not kernels.supports(input_tensor):
            return super().forward(input_tensor, temb, *args, **kwargs)
        if self.time_emb_proj is not None:
            temb = temb if self.skip_time_act else self.nonlinearity(temb)
            temb = self.time_emb_proj(temb)[:, :, None, None]
        return _residual(self, input_tensor, temb)


class InPlaceTemporalResnetBlock(TemporalResnetBlock):  # type: ignore[misc]
    """The same over time."""

    is_plain = False

    def forward(self, input_tensor: Tensor, temb: Tensor | None) -> Any:
        if self.is_plain or not kernels.supports(input_tensor):
            return super().forward(input_tensor, temb)
        if self.time_emb_proj is None:
            return _residual(self, input_tensor, None)
        temb = self.time_emb_proj(self.nonlinearity(temb)).transpose(1, 2)
        return _residual(self, input_tensor, temb[:, :, :, None, None])


def _residual(block: Any, x: Tensor, temb: Tensor | None) -> Tensor:
    """What a residual block computes, with an embedding that is added to its images, or none."""
    made = block.conv1(block.nonlinearity(block.norm1(x)))
    if temb is not None:
        fits = torch.result_type(made, temb) == made.dtype
        made = made.add_(temb) if fits else made + temb
    made = block.conv2(block.dropout(block.nonlinearity(block.norm2(made))))
    return _sum(made, x if block.conv_shortcut is None else block.conv_shortcut(x))


def _sum(made: Tensor, x: Tensor) -> Tensor:
    """The sum, in the memory of what a convolution has made if both lie alike."""
    return made.add_(x) if _is_alike(made, x) else x + made


def _is_alike(x: Tensor, y: Tensor) -> bool:
    """Whether dtype and memory layout are equal; torch passes over memory of two layouts slowly."""
    return (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())


class LerpAlphaBlender(AlphaBlender):  # type: ignore[misc]
    """diffusers' weighted sum of two branches in one pass, with one rounding."""

    is_plain = False

    def forward(
        self, x_spatial: Tensor, x_temporal: Tensor, image_only_indicator: Tensor | None = None
    ) -> Any:
        is_plain = self.is_plain or not _is_alike(x_spatial, x_temporal)
        if is_plain or not kernels.supports(x_spatial):
            return super().forward(x_spatial, x_temporal, image_only_indicator)
        alpha = self.get_alpha(image_only_indicator, x_spatial.ndim).to(x_spatial.dtype)
        if self.switch_spatial_to_temporal_mix:
            alpha = 1.0 - alpha
        return torch.lerp(x_temporal, x_spatial, alpha)


def _suits(conv: nn.Module, x: Tensor, padding: Padding) -> bool:
    """Whether a convolution inside of another module computes it with this padding."""
    return isinstance(conv, WinogradConv3d) and conv.suits(x, padding)


def _last(frames: int, x_NCTHW: Tensor, history: Tensor | None) -> Tensor:
    """A copy of the last frames that a convolution has seen."""
    if x_NCTHW.shape[2] >= frames:
        return x_NCTHW[:, :, -frames:].clone()
    before = [x_NCTHW[:, :, :1]] * frames if history is None else [history]
    return torch.cat([*before, x_NCTHW], dim=2)[:, :, -frames:].clone()
