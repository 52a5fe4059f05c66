"""Offload block by block: weights wait elsewhere and come for their call.

Put on a loaded module from outside. A *unit* is a part small enough to come as a whole, such as a
block; when it is called its parameters are brought to the device, and let go when it returns; the
next one is then already on its way (`ahead`). A part of a unit that is called by itself (keys and
values of a text, before any block runs) comes alone. What belongs to no unit, and every buffer,
stays on the device. The arithmetic is the same, so the result is too, bit for bit; the price is the
way of all weights to the device at every call.

They wait on the host, in their files, or with other ranks (`holding`).
Read next: `everyframe.runtime.loading`, which puts it on; `everyframe.planning.memory_fit`, which
decides where.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.checkpoints.tensor_file import TensorFile
from everyframe.core.plan import Precision
from everyframe.precision.dtypes import num_bytes
from everyframe.precision.islands import parameter_dtype
from everyframe.precision.quantization import as_quantised
from everyframe.precision.upcast import as_exact_as, as_raised
from everyframe.runtime.prefetch import LocalWeightsProvider, Prefetcher, WeightsProvider

#: A unit has at most this share of all parameters, if its parts allow it.
_SHARE = 1 / 12


def units(module: nn.Module) -> dict[str, nn.Module]:
    """The parts that come and go as a whole, by dotted name; they are disjoint.

    They follow from the module's structure and sizes alone, never from a device. A module that
    calls its layers piece by piece, so more or less often, says that it `comes_whole`.
    """
    limit = _count(module) * _SHARE
    return dict(_split(module, "", limit))


def unit_parameters(module: nn.Module) -> frozenset[str]:
    """Dotted names of the parameters that belong to units."""
    return frozenset(
        f"{unit}.{name}"
        for unit, part in units(module).items()
        for name, _ in part.named_parameters(remove_duplicate=False)
    )


def resident_bytes(module: nn.Module, precision: Precision) -> int:
    """Bytes of parameters that are on the device at most, when `module` is offloaded.

    The largest unit and the next largest: one computes, one is on its way.
    """
    of_units, rest = unit_bytes(module, precision)
    return rest + sum(sorted(of_units.values())[-2:])


def unit_bytes(module: nn.Module, precision: Precision) -> tuple[dict[str, int], int]:
    """Bytes of each unit's parameters by its name, and of those that belong to none."""
    with as_quantised(module, precision):
        sizes = {
            name: each.numel() * num_bytes(parameter_dtype(name, precision))
            if each.is_floating_point()
            else each.nbytes
            for name, each in module.named_parameters()
        }
        names = list(units(module))
    of_units = {
        unit: sum(size for name, size in sizes.items() if name.startswith(f"{unit}."))
        for unit in names
    }
    return of_units, sum(sizes.values()) - sum(of_units.values())


def from_host(device: torch.device) -> LocalWeightsProvider:
    """Copies of what waits in the host's memory, made even where the device is the host."""

    def bring(name: str, waiting: nn.Parameter) -> Tensor:
        return torch.empty_like(waiting, device=device).copy_(waiting)

    return LocalWeightsProvider(bring, device)


def from_files(
    weights: TensorFile, sources: Mapping[str, str], device: torch.device
) -> LocalWeightsProvider:
    """Parameters read out of their files again; `sources` are the file's names by the module's.

    Nothing of them waits anywhere: in the module they lie on meta.
    """

    def bring(name: str, waiting: nn.Parameter) -> Tensor:
        return as_raised(weights.load(sources[name], device), waiting)

    return LocalWeightsProvider(bring, device)


class BlockOffload:
    """What `apply` has put on a module; `remove` takes it off and leaves the weights waiting.

    `most_bytes` is the most that came for units and was there at once since it was put on, those on
    their way included.
    """

    def __init__(self, module: nn.Module, device: torch.device, carrier: WeightsProvider) -> None:
        self._handles: list[RemovableHandle] = []
        self._waiting: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._names = WeakKeyDictionary({part: name for name, part in module.named_modules()})
        found = units(module)
        self._ahead = Prefetcher(carrier, list(found))
        self._bytes = 0
        self.most_bytes = 0
        for unit in found.values():
            for part in unit.modules():
                if next(part.parameters(), None) is not None:
                    self._hook(part)
        waiting = {id(p) for unit in found.values() for p in unit.parameters()}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) not in waiting:
                    part._parameters[name] = _for(parameter, parameter.to(device, copy=True))
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(device)

    def remove(self) -> None:
        """Take the hooks off. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._ahead.forget()

    def _hook(self, part: nn.Module) -> None:
        mine: list[tuple[nn.Module, int]] = []

        # They are given the part, and must not hold it: it would hold itself through its hooks.
        def come(part: nn.Module, *_: object) -> None:
            # Those that came with a unit around them stay until it goes.
            layers = [each for each in part.modules() if each not in self._waiting]
            wanted = [(each, _own(each)) for each in layers if _has_own(each)]
            if not wanted:
                return
            named = {
                self._named(layer, name): parameter
                for layer, own in wanted
                for name, parameter in own.items()
            }
            came = self._ahead.take(self._names[part], named)
            for layer, own in wanted:
                self._waiting[layer] = own
                size = 0
                for name, parameter in own.items():
                    tensor = came[self._named(layer, name)]
                    layer._parameters[name] = _for(parameter, tensor)
                    # What is here already doesn't come.
                    size += 0 if tensor is parameter else tensor.nbytes
                mine.append((layer, size))
                self._bytes += size
            following = self._ahead.following(self._names[part])
            if following is not None:
                self._ahead.send_for(following, self._of(following))
            self.most_bytes = max(self.most_bytes, self._bytes + self._ahead.num_bytes)

        def go(*_: object) -> None:
            while mine:
                layer, size = mine.pop()
                layer._parameters.update(self._waiting.pop(layer))
                self._bytes -= size

        self._handles.append(part.register_forward_pre_hook(come, prepend=True))
        self._handles.append(part.register_forward_hook(go, always_call=True))

    def _of(self, part: str) -> dict[str, nn.Parameter]:
        """The parameters of that part that wait, by their names."""
        module = next((each for each, name in self._names.items() if name == part), None)
        if module is None:
            return {}
        layers = (layer for layer in module.modules() if layer not in self._waiting)
        return {
            self._named(layer, name): parameter
            for layer in layers
            for name, parameter in _own(layer).items()
        }

    def _named(self, layer: nn.Module, name: str) -> str:
        """A parameter's dotted name in the whole module."""
        return f"{self._names[layer]}.{name}".lstrip(".")


def apply(
    module: nn.Module, device: str | torch.device, carrier: WeightsProvider | None = None
) -> BlockOffload:
    """Offload a module whose weights lie on the host, or wherever `carrier` gets them from.

    It then computes on `device`.
    """
    device = torch.device(device)
    return BlockOffload(module, device, carrier or from_host(device))


def _has_own(layer: nn.Module) -> bool:
    return any(each is not None for each in layer._parameters.values())


def _own(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in layer._parameters.items() if each is not None}


def _for(waiting: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """The parameter that takes the place of one that waits."""
    return as_exact_as(waiting, nn.Parameter(tensor.detach(), requires_grad=False))


def _split(module: nn.Module, name: str, limit: float) -> Iterator[tuple[str, nn.Module]]:
    children = [(key, child) for key, child in module.named_children() if _count(child)]
    leaf = not children or isinstance(module, nn.MultiheadAttention)
    leaf = leaf or getattr(module, "comes_whole", False)
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


class ModelOffload:
    """What `take_turns` has put on modules; `remove` takes it off and leaves weights on the host.

    `most_bytes` is the most that their parameters had on the device at once.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._here: nn.Module | None = None
        self._on_host: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self.most_bytes = 0
        for module in modules:
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        part._buffers[name] = buffer.to(device)
                # An autoencoder's `decode` is no call of the module itself, but of its parts.
                hook = part.register_forward_pre_hook(self._coming(module), prepend=True)
                self._handles.append(hook)

    def remove(self) -> None:
        """Take the hooks off. A second call does nothing."""
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _coming(self, module: nn.Module) -> Callable[..., None]:
        owner = weakref.ref(module)  # it would hold itself through its hooks

        def come(*_: object) -> None:
            if self._here is not owner():
                self._leave()
                self._come(owner())

        return come

    def _come(self, module: nn.Module | None) -> None:
        assert module is not None, "it is being called"
        copies: dict[int, nn.Parameter] = {}  # some have several names
        for part in module.modules():
            kept = {name: each for name, each in part._parameters.items() if each is not None}
            self._on_host[part] = kept
            for name, parameter in kept.items():
                if id(parameter) not in copies:
                    copies[id(parameter)] = _moved(parameter, self._device)
                part._parameters[name] = copies[id(parameter)]
        self._here = module
        self.most_bytes = max(self.most_bytes, sum(each.nbytes for each in copies.values()))

    def _leave(self) -> None:
        for part, kept in self._on_host.items():
            part._parameters.update(kept)
        self._on_host, self._here = {}, None


def take_turns(modules: Iterable[nn.Module], device: str | torch.device) -> ModelOffload:
    """Have modules, whose weights lie on the host, come to `device` one at a time as a whole."""
    return ModelOffload(modules, torch.device(device))


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A copy on the device, made even where the device is the host: it is let go afterwards."""
    copy = torch.empty_like(parameter, device=device).copy_(parameter)
    return nn.Parameter(copy, requires_grad=False)
