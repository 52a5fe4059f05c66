"""Offload block by block: weights wait in the host's memory and come to the device for their call.

Put on a loaded module from outside. A *unit* is a part small enough to come as a whole, such as a
block; when it is called its parameters are copied to the device, and let go when it returns. A
layer of a unit that is called by itself (keys and values of a text, before any block runs) comes
alone. What belongs to no unit, and every buffer, stays on the device. The arithmetic is the same,
so the result is too, bit for bit; the price is the way of all weights to the device at every call.

Read next: `everyframe.families.loading`, which puts it on; `everyframe.planning.fitting`, which
decides where.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from everyframe.core.plan import Precision
from everyframe.precision.dtypes import num_bytes
from everyframe.precision.islands import parameter_dtype

#: A unit has at most this share of all parameters, if its parts allow it.
_SHARE = 1 / 12


def units(module: nn.Module) -> dict[str, nn.Module]:
    """The parts that come and go as a whole, by dotted name; they are disjoint.

    They follow from the module's structure and sizes alone, never from a device.
    """
    limit = _count(module) * _SHARE
    return dict(_split(module, "", limit))


def resident_bytes(module: nn.Module, precision: Precision) -> int:
    """Bytes of parameters that are on the device at most, when `module` is offloaded."""
    sizes = {
        name: parameter.numel() * num_bytes(parameter_dtype(name, precision))
        for name, parameter in module.named_parameters()
    }
    parts = {f"{name}." for name in units(module)}
    of_parts = {
        part: sum(size for name, size in sizes.items() if name.startswith(part)) for part in parts
    }
    return sum(sizes.values()) - sum(of_parts.values()) + max(of_parts.values(), default=0)


class Offload:
    """What `apply` has put on a module; `remove` takes it off and leaves the weights on the host.

    `most_bytes` is the most that units had on the device at once since it was put on.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._on_host: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._now = self.most_bytes = 0
        for unit in units(module).values():
            self._hook(unit)
            for layer in unit.modules():
                if layer is not unit and _has_own(layer):
                    self._hook(layer)
        waiting = {id(p) for unit in units(module).values() for p in unit.parameters()}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) not in waiting:
                    part._parameters[name] = _moved(parameter, device)
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(device)

    def remove(self) -> None:
        """Take the hooks off. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, part: nn.Module) -> None:
        mine: list[nn.Module] = []

        # They are given the part, and must not hold it: it would hold itself through its hooks.
        def come(part: nn.Module, *_: object) -> None:
            for layer in part.modules():
                # Those that came with a unit around them stay until it goes.
                if layer not in self._on_host and _has_own(layer):
                    self._come(layer)
                    mine.append(layer)

        def go(*_: object) -> None:
            while mine:
                self._go(mine.pop())

        self._handles.append(part.register_forward_pre_hook(come, prepend=True))
        self._handles.append(part.register_forward_hook(go, always_call=True))

    def _come(self, layer: nn.Module) -> None:
        kept = {name: each for name, each in layer._parameters.items() if each is not None}
        self._on_host[layer] = kept
        for name, parameter in kept.items():
            layer._parameters[name] = _moved(parameter, self._device)
            self._now += parameter.nbytes
        self.most_bytes = max(self.most_bytes, self._now)

    def _go(self, layer: nn.Module) -> None:
        for name, parameter in self._on_host.pop(layer).items():
            layer._parameters[name] = parameter
            self._now -= parameter.nbytes


def apply(module: nn.Module, device: str | torch.device) -> Offload:
    """Offload a module whose weights lie on the host; it then computes on `device`."""
    return Offload(module, torch.device(device))


def _has_own(layer: nn.Module) -> bool:
    return any(each is not None for each in layer._parameters.values())


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A copy on the device, made even where the device is the host: it is let go afterwards."""
    copy = torch.empty_like(parameter, device=device).copy_(parameter)
    return nn.Parameter(copy, requires_grad=False)


def _split(module: nn.Module, name: str, limit: float) -> Iterator[tuple[str, nn.Module]]:
    children = [(key, child) for key, child in module.named_children() if _count(child)]
    leaf = not children or isinstance(module, nn.MultiheadAttention)
    if name and (leaf or (_count(module) <= limit and not _only_holds(module))):
        yield name, module
        return
    for key, child in children:
        yield from _split(child, f"{name}.{key}" if name else key, limit)


def _only_holds(module: nn.Module) -> bool:
    """Lists are never called themselves, so they can't be waited for."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
