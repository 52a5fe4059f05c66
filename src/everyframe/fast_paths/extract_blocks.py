"""Extract blocks from a component and run them alone, with random weights and inputs.

A dry run of the component records the inputs of every block. Block and inputs are then filled with
values as large as in a trained model, so the block runs without the rest of the model and before
any weights are loaded. One block represents all equal ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.core.plan import Precision
from everyframe.fast_paths.apply import apply_fast_paths, block_names, swap_modules
from everyframe.fast_paths.target import CertificationTarget, TargetCall
from everyframe.precision import cast_hooks
from everyframe.precision.islands import in_island
from everyframe.precision.quantization import quantise_layers

#: Every 64th input channel is 20 times as large as the others, as in trained models; accumulation
#: in a narrow dtype overflows there.
_LARGE, _EVERY = 20.0, 64


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of a block: positional and keyword arguments, tensors on meta."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BlockLocation(nn.Module):
    """A block as an item of a module list, as in its model, without the rest of the model."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.blocks[0](*args, **kwargs)


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
    """

    name: str
    count: int
    module: nn.Module
    given: BlockInputs
    wide: BlockInputs
    precision: Precision

    def alone(self, paths: Sequence[str], *, in_float32: bool = False) -> BlockLocation:
        """Copy the block in the plan's precision or float32, with these fast paths applied."""
        alone = BlockLocation(copy.deepcopy(self.module))
        swap_modules(alone, paths)
        wide = Precision("float32", "float32")
        if not in_float32:
            quantise_layers(alone, self.precision)
        cast_hooks.add_cast_hooks(alone, wide if in_float32 else self.precision, outputs=())
        apply_fast_paths(alone, paths, compiles=True)
        return alone


def blocks_of(
    subject: CertificationTarget, parts: Callable[[nn.Module], Iterable[str]] = block_names
) -> Iterator[ExtractedBlock]:
    """Yield one block of every kind in the component, filled with values.

    `parts` returns the names of the submodules that count as blocks.
    """
    for call in subject.calls:
        module = call.module()
        names = tuple(parts(module))
        given = _noted(subject, call, names, subject.precision)
        wide = _noted(subject, call, names, Precision("float32", "float32"))
        alike: dict[Any, list[str]] = {}
        for name in names:
            if name in given:
                alike.setdefault(_kind(module.get_submodule(name), given[name]), []).append(name)
        for same in alike.values():
            yield _block(subject, module, same, given[same[0]], wide[same[0]])


def _noted(
    subject: CertificationTarget, call: TargetCall, names: tuple[str, ...], precision: Precision
) -> dict[str, BlockInputs]:
    """Inputs of each submodule's first call, in that precision."""
    module = call.module()
    given: dict[str, BlockInputs] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.setdefault(name, BlockInputs(args, kwargs))

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


def _kind(module: nn.Module, given: BlockInputs) -> Any:
    """Key of equal blocks: class, parameter shapes, input shapes."""
    shapes: list[Any] = [type(module)]
    shapes += [(name, tuple(p.shape)) for name, p in module.named_parameters()]

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    cast_hooks.map_tensors((given.args, given.kwargs), note)
    return tuple(shapes)


def _block(
    subject: CertificationTarget,
    whole: nn.Module,
    names: list[str],
    given: BlockInputs,
    wide: BlockInputs,
) -> ExtractedBlock:
    name, device = names[0], subject.device.torch_name
    # Weights of the dry run have the dtype of its last precision, and no numbers.
    module = copy.deepcopy(whole.get_submodule(name)).to_empty(device=device)
    _fill(module)
    module.eval().requires_grad_(False)
    inside = [own for own, _ in module.named_parameters()]
    islands = [
        f"blocks.0.{own}" for own in inside if in_island(f"{name}.{own}", subject.precision.islands)
    ]
    precision = replace(subject.precision, islands=tuple(islands))
    return ExtractedBlock(
        name, len(names), module, _numbers(given, device), _numbers(wide, device), precision
    )


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
