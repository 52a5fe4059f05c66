"""Extract blocks from a component and run them alone, with random weights and inputs.

A dry run of the component records the inputs of every block. Block and inputs are then filled with
values as large as in a trained model, so the block runs without the rest of the model and before
any weights are loaded. One block represents all equal ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from everyframe.core.plan import FLOAT32, Precision
from everyframe.core.quality import PRODUCTS
from everyframe.fast_paths.apply import applies_to, apply_fast_paths, block_names, swap_modules
from everyframe.fast_paths.benchmark import Comparison
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from everyframe.fast_paths.modules import residual_blocks
from everyframe.fast_paths.modules.convolution_modules import is_temporal
from everyframe.ops.attention_override import AttentionOverride
from everyframe.precision import cast_hooks
from everyframe.precision.islands import is_in_island
from everyframe.precision.quantization import quantize_layers

#: Every 64th input channel is 20 times as large as the others, as in trained models; accumulation
#: in a narrow dtype overflows there.
_LARGE, _EVERY = 20.0, 64

#: Dimensions below this are not cut: a kernel of a convolution has to fit in.
_SHORTEST = 8


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of a block: positional and keyword arguments, tensors on meta."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, module: nn.Module) -> Any:
        """The module's result for these inputs, whose lists it may change."""
        given = self.copied()
        return module(*given.args, **given.kwargs)

    def copied(self) -> BlockInputs:
        """The same tensors in lists and mappings of their own."""
        return BlockInputs(*cast_hooks.map_tensors((self.args, self.kwargs), lambda x: x))


class BlockLocation(nn.Module):
    """A block as an item of a module list, as in its model, without the rest of the model."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.blocks[0](*args, **kwargs)


class _WithoutAttention(BlockLocation):
    """The same with a sum in the place of torch's attention, as sensitive to its inputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with AttentionOverride(lambda attend, q, k, v, *masks, **how: q + k + v):
            return super().forward(*args, **kwargs)


class _FirstInput(nn.Module):
    def forward(self, first: Tensor, *_: Any, **__: Any) -> Tensor:
        return first


@dataclass(frozen=True)
class ExtractedBlock:
    """A block filled with values, in float32 on the device, with its inputs.

    Attributes:
        name: dotted name in the component.
        count: number of equal blocks.
        module: the block.
        given: inputs in the plan's precision.
        wide: the same values in float32.
        precision: the plan's precision, with islands as names in `BlockLocation`.
        cut: how many times as large its largest input is in a run.
        casts_inputs: whether a run casts inputs in whatever precision, as in a pipeline of
            diffusers, whose code is not ours.
        has_silu: whether it is a norm before a SiLU, which a fast path may take into it; the copies
            apply that too.
        omitted: children that the copies lack, and torch's attention with them: they would hide
            what a path changes. Each gives back its first input.
    """

    name: str
    count: int
    module: nn.Module
    given: BlockInputs
    wide: BlockInputs
    precision: Precision
    cut: float = 1.0
    casts_inputs: bool = False
    has_silu: bool = False
    omitted: tuple[str, ...] = ()

    def alone(self, paths: Sequence[str], *, in_float32: bool = False) -> BlockLocation:
        """Copy the block in the plan's precision or float32, with these fast paths applied."""
        omitted: dict[int, Any] = {
            id(self.module.get_submodule(name)): _FirstInput() for name in self.omitted
        }
        kind = _WithoutAttention if omitted else BlockLocation
        alone = kind(copy.deepcopy(self.module, omitted))
        swap_modules(alone, paths)
        if self.has_silu:
            residual_blocks.add_silu(alone.blocks[0])
        if not in_float32:
            dtype = next((path for path in paths if path in PRODUCTS), self.precision.weight_dtype)
            quantize_layers(alone, replace(self.precision, weight_dtype=dtype))
        cast_hooks.add_cast_hooks(alone, FLOAT32 if in_float32 else self.precision, outputs=())
        if self.casts_inputs:
            cast_hooks.add_input_casts(alone)
        apply_fast_paths(alone, paths, compiles=True)
        return alone

    def compare(
        self, plain: nn.Module, fast: nn.Module, kind: str = "block ", allowed: float | None = None
    ) -> Comparison:
        """Comparison of two copies of the block on its inputs, weighted by its share of a run."""
        return Comparison(
            f"{kind}{self.name}, one of {self.count}",
            truth=partial(self.wide.call, self.alone((), in_float32=True)),
            plain=partial(self.given.call, plain),
            fast=partial(self.given.call, fast),
            allowed=allowed,
            weight=self.count * self.cut,
        )


def blocks_of(
    subject: CertificationTarget,
    parts: Callable[[nn.Module], Iterable[str]] = block_names,
    *,
    most: int | None = None,
    most_elements: int | None = None,
) -> Iterator[ExtractedBlock]:
    """Yield one block of every kind in the component, filled with values.

    `parts` returns the names of the submodules that count as blocks. Of each call, the `most` kinds
    with the largest inputs in all are yielded. Inputs of more than `most_elements` are cut in batch
    and places, never in channels, which suits a layer and not a whole block.
    """
    for call in subject.calls:
        module = call.module()
        names = tuple(parts(module))
        norms = residual_blocks.norms_before_silu(module)
        given = _record_inputs(subject, call, names, subject.precision)
        wide = _record_inputs(subject, call, names, FLOAT32)
        alike: dict[Any, list[str]] = {}
        for name in names:
            if name in given:
                kind = _kind(module.get_submodule(name), given[name]), name in norms
                alike.setdefault(kind, []).append(name)
        largest = sorted(
            alike.values(), key=lambda same: -len(same) * _num_elements(given[same[0]])
        )
        for same in largest[:most] if most else alike.values():
            first = given[same[0]]
            block = _block(
                subject, module, same,
                reduced(first, most_elements), reduced(wide[same[0]], most_elements),
                has_silu=same[0] in norms,
            )  # fmt: skip
            cut = max(_num_elements(first), 1) / max(_num_elements(block.given), 1)
            yield replace(block, cut=cut, casts_inputs=call.call.is_foreign)


def _tensors(given: BlockInputs) -> list[Tensor]:
    """Floating tensors among the arguments themselves."""
    values = (*given.args, *given.kwargs.values())
    return [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]


def _num_elements(given: BlockInputs) -> int:
    return max((each.numel() for each in _tensors(given)), default=0)


def reduced(given: BlockInputs, most: int | None) -> BlockInputs:
    """Inputs with the batch and the places cut until no tensor has more than `most` elements.

    Channels are the second dimension of four and more (B, C, ...) in channels-first layers and the
    last elsewhere; neither is cut, nor the second of tokens (b, T, s, C), which are frames. Smaller
    maps beside the first tensor keep their ratio to it. Beside tokens (B, N, C), all that has as
    many is cut. Tables inside of arguments are cut with the places that they are for.
    """
    found = _tensors(given)
    if most is None or not found:
        return given
    first, sizes = found[0], list(found[0].shape)
    is_tokens = first.ndim == 3
    if not is_tokens and any(each.ndim != first.ndim for each in found):
        return given
    axes = [axis for axis in range(first.ndim) if axis not in (1, first.ndim - 1)]
    if first.ndim <= 3:
        axes = list(range(first.ndim - 1))
    if not is_tokens:
        axes = [axis for axis in axes if all(_has_ratio(each, first, axis) for each in found)]
    while prod(sizes) > most:
        longest = max(axes, key=lambda axis: sizes[axis], default=None)
        if longest is None or sizes[longest] < _SHORTEST:
            break
        sizes[longest] = (sizes[longest] + 1) // 2

    def cut(tensor: Tensor) -> Tensor:
        is_table = not any(tensor is each for each in found)
        if is_table and tensor.ndim == 2:
            place = next((axis for axis in axes[::-1] if first.shape[axis] == len(tensor)), None)
            return tensor if place is None else tensor[: sizes[place]]
        for axis in (each for each in axes if each < tensor.ndim):
            own, whole = tensor.shape[axis], first.shape[axis]
            if own == whole or not (is_tokens or is_table):
                tensor = tensor.narrow(axis, 0, -(-own * sizes[axis] // whole))
        return tensor

    args, kwargs = cast_hooks.map_tensors((given.args, given.kwargs), cut)
    return BlockInputs(args, kwargs)


def _has_ratio(tensor: Tensor, first: Tensor, axis: int) -> bool:
    """Whether a size of the first tensor is a multiple of this one's, of tokens 1 or the same."""
    own, whole = tensor.shape[axis], first.shape[axis]
    return own in (1, whole) or (first.ndim > 4 and own > 0 and whole % own == 0)


def _record_inputs(
    subject: CertificationTarget, call: TargetCall, names: tuple[str, ...], precision: Precision
) -> dict[str, BlockInputs]:
    """Inputs of each submodule's first call, in that precision."""
    module = call.module()
    given: dict[str, BlockInputs] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in given:
                own = BlockInputs(tuple(map(_without_ranks, args)), {
                    key: _without_ranks(value) for key, value in kwargs.items()
                })  # fmt: skip
                given[name] = own.copied()

        return note

    handles = [
        module.get_submodule(name).register_forward_pre_hook(
            noting(name), prepend=True, with_kwargs=True
        )
        for name in names
    ]
    try:
        call.dry_run(precision, subject.device)
    finally:
        for handle in handles:
            handle.remove()
    return given


def _without_ranks(value: Any) -> Any:
    """An argument without the function that exchanges a norm's statistics with other ranks."""
    is_function = callable(value) and not isinstance(value, nn.Module)
    return None if is_function else value


def _kind(module: nn.Module, given: BlockInputs) -> Any:
    """Key of equal blocks: class, parameter shapes, input shapes."""
    shapes: list[Any] = [type(module)]
    shapes += [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    shapes += [tuple(each.shape) for each in cast_hooks.tensors_in((given.args, given.kwargs))]
    return tuple(shapes)


def _block(
    subject: CertificationTarget,
    whole: nn.Module,
    names: list[str],
    given: BlockInputs,
    wide: BlockInputs,
    *,
    has_silu: bool,
) -> ExtractedBlock:
    name, device = names[0], subject.device.torch_name
    # Weights of the dry run have the dtype of its last precision, and no numbers.
    module = copy.deepcopy(whole.get_submodule(name)).to_empty(device=device)
    _fill(module)
    module.eval().requires_grad_(False)
    inside, held = dict(module.named_parameters()), subject.precision.islands
    islands = [f"blocks.0.{own}" for own in inside if is_in_island(f"{name}.{own}", held)]
    precision = replace(subject.precision, islands=tuple(islands))
    given, wide = _numbers(given, device), _numbers(wide, device)
    if _is_channels_last(whole, module, has_silu=has_silu):
        # Not what is compared with: torch's norms of that layout lose digits.
        given = _with_channels_last(given)
    return ExtractedBlock(name, len(names), module, given, wide, precision, has_silu=has_silu)


def _fill(module: nn.Module) -> None:
    """Fill a module with values of trained magnitude: a product preserves its input's magnitude."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not tensor.is_floating_point():
            tensor.data.zero_()
            continue
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim >= 2:
            values /= max(tensor[0].numel(), 1) ** 0.5
        elif name.endswith("weight"):
            values = 1 + 0.1 * values
        else:
            values *= 0.02
        tensor.data = values.to(tensor.device)


def _numbers(given: BlockInputs, device: str) -> BlockInputs:
    """Fill the arguments with values, equal in every precision up to rounding."""
    generator = torch.Generator().manual_seed(1)

    def filled(tensor: Tensor) -> Tensor:
        if tensor.device.type != "meta":
            return tensor
        if tensor.dtype == torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool, device=device)
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        values = torch.randn(tensor.shape, generator=generator)
        if values.ndim > 1:
            values[..., ::_EVERY] *= _LARGE
        values = values.to(device, tensor.dtype)
        return torch.empty_like(tensor, device=device).copy_(values)  # with its strides

    args, kwargs = cast_hooks.map_tensors((given.args, given.kwargs), filled)
    return BlockInputs(args, kwargs)


def _is_channels_last(whole: nn.Module, part: nn.Module, *, has_silu: bool) -> bool:
    """Whether a layer's input lies in memory channels last; tensors on meta don't show it.

    A norm's does too if convolutions by Winograd's algorithm may give it, and so does that of a
    convolution over time, which comes after a norm.
    """
    is_norm = has_silu or isinstance(part, nn.GroupNorm)
    if getattr(whole, "is_channels_last", False):
        return is_norm or isinstance(part, _ConvNd)
    return (is_norm or is_temporal(part)) and applies_to("winograd", whole)


def _with_channels_last(given: BlockInputs) -> BlockInputs:
    def lay(tensor: Tensor) -> Tensor:
        is_image = tensor.ndim > 3
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if is_image else tensor

    args, kwargs = cast_hooks.map_tensors((given.args, given.kwargs), lay)
    return BlockInputs(args, kwargs)
