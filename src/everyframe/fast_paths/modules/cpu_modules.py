"""Modules that compute by our kernels in C or by oneDNN's, in place of plain ones on a CPU.

Each is a subclass of the module that it replaces, with the same parameters, names and hooks, and
computes as that does where the kernel does not suit: other dtypes, gradients, a dry run, a compiled
block, a repair that wants plain kernels (it sets `is_plain`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everyframe.fast_paths.modules import wan_modules
from everyframe.fast_paths.modules.convolution_modules import (
    CONVOLUTIONS,
    convolution_kind,
    is_temporal,
    is_winograd,
    is_winograd_over_time,
    multiplies,
)
from everyframe.fast_paths.modules.diffusers_attention import is_attention, native_kind
from everyframe.fast_paths.modules.modulation_modules import (
    NativeGatedAdd,
    NativeModulate,
    NativeRotate,
    NativeRotateAxes,
)
from everyframe.ops.activation import GatedGELU
from everyframe.ops.attention import AttentionCore, attention, merge_heads, split_heads
from everyframe.ops.modulation import GatedAdd, Modulate
from everyframe.ops.module_class import recast
from everyframe.ops.native import kernels
from everyframe.ops.norm import (
    GroupNormSiLU,
    LayerNorm,
    RMSNorm,
    Statistics,
    WideGroupNorm,
    WideLayerNorm,
)
from everyframe.ops.rope import Rotate, RotateAxes
from everyframe.ops.self_attention import SelfAttention, TemporalAttention


class NativeGroupNorm(WideGroupNorm):
    """Group norm in C; a shard of a sample, which has foreign statistics, is normed plainly."""

    is_plain = False
    has_silu = False

    def forward(self, x: Tensor, statistics: Statistics | None = None) -> Tensor:
        found = statistics(x, self.num_groups) if statistics is not None else None
        if self.is_plain or found is not None or not kernels.supports(x):
            # Statistics are exchanged among ranks: asked for once, whoever computes.
            return super().forward(x, None if found is None else lambda *_: found)
        return kernels.group_norm(
            x, self.num_groups, self.weight, self.bias, self.eps, has_silu=self.has_silu
        )


class NativeGroupNormSiLU(NativeGroupNorm, GroupNormSiLU):
    """Group norm and SiLU in one pass."""

    has_silu = True


class NativeTorchGroupNorm(nn.GroupNorm):
    """torch's own group norm, in C; with SiLU in a block of `residual_blocks`."""

    is_plain = False
    has_silu = False

    def suits(self, x: Tensor) -> bool:
        """Whether the kernel computes it; a map needs that."""
        return not self.is_plain and x.dtype == self.weight.dtype and kernels.supports(x)

    def forward(
        self,
        input: Tensor,  # noqa: A002 - torch's name
        by: kernels.NormMap | None = None,
        *,
        has_silu: bool = False,
    ) -> Tensor:
        has_silu = has_silu or self.has_silu
        if not self.suits(input):
            assert by is None
            plain = super().forward(input)
            return F.silu(plain) if has_silu else plain
        return kernels.group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, has_silu=has_silu, by=by
        )


class NativeLayerNorm(LayerNorm):
    """Layer norm without parameters, in C."""

    is_plain = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain or not kernels.supports(x):
            return super().forward(x)
        return kernels.layer_norm(x, None, None, self.eps)


class NativeWideLayerNorm(WideLayerNorm):
    """Layer norm with float32 parameters for input of any dtype, in C."""

    is_plain = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain or len(self.normalized_shape) > 1 or not kernels.supports(x):
            return super().forward(x)
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)


class NativeRMSNorm(RMSNorm):
    """RMS norm in one pass over memory, in place of four."""

    is_plain = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_plain or not kernels.supports(x):
            return super().forward(x)
        return kernels.layer_norm(x, self.weight, None, self.eps, is_rms=True)


class NativeTorchRMSNorm(nn.RMSNorm):
    """torch's own RMS norm, in C."""

    is_plain = False

    def forward(self, x: Tensor) -> Tensor:
        suits = self.eps is not None and len(self.normalized_shape) == 1
        if self.is_plain or not suits or x.dtype != self.weight.dtype or not kernels.supports(x):
            return super().forward(x)
        assert self.eps is not None
        return kernels.layer_norm(x, self.weight, None, self.eps, is_rms=True)


class NativeGatedGELU(GatedGELU):
    """The gated GELU in one pass, with one rounding."""

    is_plain = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.is_plain or not kernels.supports(x) else kernels.geglu(x)


class NativeGELU(nn.GELU):
    """torch's GELU in C, whose approximation by tanh takes half the time."""

    is_plain = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if self.is_plain or not kernels.supports(input):
            return super().forward(input)
        return kernels.gelu(input, self.approximate)


class NativeSelfAttention(SelfAttention):
    """Self-attention in blocks, by the processor's products for bfloat16 where it has them."""

    is_plain = False

    def forward(self, rows_NLC: Tensor) -> Tensor:
        if self.is_plain or not kernels.supports(rows_NLC):
            return super().forward(rows_NLC)
        q, k, v = (
            split_heads(project(rows_NLC), self.heads)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        if not kernels.supports_attention(q, k, v):
            return self.out(merge_heads(attention(q, k, v, scale=self.scale)))
        return self.out(kernels.attention(q, k, v, self.scale).flatten(2))


class NativeAttentionCore(AttentionCore):
    """The same between projections of other makes, if every query sees every key."""

    is_plain = False

    def forward(
        self, q_BHQD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        q, k = (each.to(v_BHLD.dtype) for each in (q_BHQD, k_BHLD))
        is_masked = self.is_causal or mask is not None
        if self.is_plain or is_masked or not kernels.supports_attention(q, k, v_BHLD):
            return super().forward(q_BHQD, k_BHLD, v_BHLD, mask)
        return kernels.attention(q, k, v_BHLD, q.shape[-1] ** -0.5).transpose(1, 2)


class NativeTemporalAttention(TemporalAttention):
    """Attention over the few frames of a pixel, where they lie: nothing is transposed."""

    is_plain = False

    def forward(self, x_bTsC: Tensor) -> Tensor:
        width = x_bTsC.shape[-1] // self.heads
        suits = x_bTsC.shape[1] <= kernels.MOST_FRAMES and width <= kernels.MOST_WIDTH
        if self.is_plain or not suits or width % 16 or not kernels.supports(x_bTsC):
            return super().forward(x_bTsC)
        q, k, v = (project(x_bTsC) for project in (self.to_q, self.to_k, self.to_v))
        if not q.dtype == k.dtype == v.dtype or not kernels.supports(q, k, v):
            return super().forward(x_bTsC)
        return self.out(kernels.frame_attention(q, k, v, self.heads, self.scale))


def onednn_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "none", algorithm: str = ""
) -> Tensor:
    """``activation(x W^T + b)`` in one kernel: a private operator, made for torch's compiler."""
    operators: Any = torch.ops.mkldnn
    made: Tensor = operators._linear_pointwise(x, weight, bias, activation, [], algorithm)
    return made


def has_onednn_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether `onednn_linear` takes these."""
    return multiplies(x, weight) and _multiplies_in(x.dtype)


@cache
def _multiplies_in(dtype: torch.dtype) -> bool:
    """Whether this oneDNN has products of that dtype: in bfloat16 none on CPUs without AVX-512."""
    try:
        onednn_linear(torch.ones(2, 16, dtype=dtype), torch.ones(16, 16, dtype=dtype), None)
    except RuntimeError:
        return False
    return True


class OneDNNLinear(nn.Linear):
    """A linear layer by oneDNN, its bias added inside the product.

    torch copies the bias over the output first in bfloat16, and takes MKL for float32, which knows
    no AVX-512 on processors of other makers.
    """

    is_plain = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if self.is_plain or not has_onednn_linear(input, self.weight):
            return super().forward(input)
        return onednn_linear(input, self.weight, self.bias)


#: By fast path: the class that each plain class becomes.
KINDS: Mapping[str, Mapping[type[nn.Module], type[nn.Module]]] = {
    "native-norm": {
        GroupNormSiLU: NativeGroupNormSiLU,
        WideGroupNorm: NativeGroupNorm,
        nn.GroupNorm: NativeTorchGroupNorm,
        LayerNorm: NativeLayerNorm,
        WideLayerNorm: NativeWideLayerNorm,
        RMSNorm: NativeRMSNorm,
        nn.RMSNorm: NativeTorchRMSNorm,
    },
    "native-gate": {GatedAdd: NativeGatedAdd, Modulate: NativeModulate},
    "native-rope": {Rotate: NativeRotate, RotateAxes: NativeRotateAxes},
    "native-gelu": {nn.GELU: NativeGELU},
    "native-geglu": {GatedGELU: NativeGatedGELU},
    "native-attention": {TemporalAttention: NativeTemporalAttention},
    "native-flash": {SelfAttention: NativeSelfAttention, AttentionCore: NativeAttentionCore},
    "onednn-linear": {nn.Linear: OneDNNLinear},
}

#: The fast paths that swap modules here.
PATHS = (*KINDS, *CONVOLUTIONS)

#: The module of subclasses of diffusers' classes, which is imported where a model has them only.
DIFFUSERS_MODULES = "everyframe.fast_paths.modules.diffusers_modules"
_VAES = "diffusers.models.autoencoders.autoencoder_kl"
#: The same for classes of diffusers: names in that module.
_FOREIGN: Mapping[tuple[str, str], str] = {
    ("native-geglu", "diffusers.models.activations.GEGLU"): "NativeGEGLU",
    ("native-gelu", "diffusers.models.activations.GELU"): "NativeProjectedGELU",
    ("native-gate", "diffusers.models.resnet.AlphaBlender"): "LerpAlphaBlender",
    ("native-norm", "diffusers.models.normalization.FP32LayerNorm"): "NativeFP32LayerNorm",
    ("native-norm", "diffusers.models.normalization.RMSNorm"): "NativeDiffusersRMSNorm",
    ("native-norm", f"{_VAES}_wan.WanRMS_norm"): "NativeWanRMSNorm",
    ("native-norm", f"{_VAES}_hunyuanvideo15.HunyuanVideo15RMS_norm"): (
        "NativeHunyuanVideo15RMSNorm"
    ),
    ("native-norm", f"{_VAES}_ltx2.PerChannelRMSNorm"): "NativePerChannelRMSNorm",
    ("native-norm", f"{_VAES}_cogvideox.CogVideoXSpatialNorm3D"): "NativeSpatialNorm3D",
    ("native-norm", f"{_VAES}_mochi.MochiChunkedGroupNorm3D"): "NativeChunkedGroupNorm3D",
    ("winograd", f"{_VAES}_wan.WanCausalConv3d"): "WinogradWanConv3d",
    ("winograd", f"{_VAES}_hunyuanvideo15.HunyuanVideo15CausalConv3d"): (
        "WinogradHunyuanVideo15Conv3d"
    ),
    ("winograd", f"{_VAES}_ltx.LTXVideoCausalConv3d"): "WinogradLTXVideoConv3d",
    ("winograd", f"{_VAES}_ltx2.LTX2VideoCausalConv3d"): "WinogradLTX2VideoConv3d",
    ("winograd", f"{_VAES}_cogvideox.CogVideoXCausalConv3d"): "WinogradCogVideoXConv3d",
    ("winograd", f"{_VAES}_hunyuan_video.HunyuanVideoCausalConv3d"): "WinogradHunyuanVideoConv3d",
    (
        "winograd",
        f"{_VAES}_hunyuan_video.HunyuanVideoResnetBlockCausal3D",
    ): "WinogradHunyuanVideoBlock",
}


def places(path: str, module: nn.Module) -> tuple[str, ...]:
    """Names of the submodules that the path replaces, but for those inside of another."""
    found = _all_places(path, module)
    return tuple(name for name in found if not any(outer in found for outer in _above(name)))


def _all_places(path: str, module: nn.Module) -> dict[str, type[nn.Module]]:
    """Names of all submodules that the path replaces, with the class of each."""
    kinds = ((name, _new_kind(path, part)) for name, part in module.named_modules() if name)
    return {name: kind for name, kind in kinds if kind is not None}


def _above(name: str) -> Iterator[str]:
    """Names of the modules that hold this one."""
    while name := name.rpartition(".")[0]:
        yield name


def _new_kind(path: str, part: nn.Module) -> type[nn.Module] | None:
    own = type(part)
    foreign = _FOREIGN.get((path, f"{own.__module__}.{own.__qualname__}"))
    if foreign is not None:  # which may hold the module that the path is for
        found: type[nn.Module] = getattr(import_module(DIFFUSERS_MODULES), foreign)
        return found if any(_suits(path, each) for each in part.modules()) else None
    if not _suits(path, part):
        return None
    if path == "native-flash" and is_attention(part):
        return native_kind(own)  # type: ignore[arg-type]
    if path in CONVOLUTIONS:
        return convolution_kind(path, own)  # type: ignore[arg-type]
    return KINDS[path].get(own) or wan_modules.fused_kind(path, own)  # type: ignore[arg-type]


def _suits(path: str, part: nn.Module) -> bool:
    """False for a norm without weights, attention without positions, and most convolutions."""
    if path == "winograd":
        return is_winograd(part)
    if path == "temporal-conv":
        return is_temporal(part)
    if path == "temporal-winograd":
        return is_winograd_over_time(part)
    if path == "native-rope":
        return not getattr(part, "is_cross_attention", False)
    if isinstance(part, nn.GroupNorm):
        return bool(part.affine)
    return not isinstance(part, nn.RMSNorm) or part.weight is not None


def swapper(path: str) -> Callable[[nn.Module, tuple[str, ...]], None]:
    """The function that swaps all `places` of a path, inside of blocks and outside."""

    def swap(module: nn.Module, blocks: tuple[str, ...]) -> None:
        for name, kind in _all_places(path, module).items():
            recast(module, name, kind)

    return swap
