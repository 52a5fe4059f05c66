"""Offload weights: copy each block to the device for its call, and free it afterwards.

A *unit* is a submodule small enough to move as a whole, such as a transformer block. Its parameters
come to the device when it is called and leave when it returns; the next unit is already being
copied then (`prefetch`). A submodule of a unit that is called on its own (keys and values of the
text, before any block runs) is copied alone. Parameters outside units and all buffers stay on the
device. Results are the same bit for bit; the cost is one transfer of all weights per call.

Offloaded weights are in host memory, in their files, or on other ranks (`weight_sharding`).
`ModelOffload` moves whole modules instead, one on the device at a time.
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
from everyframe.precision.quantization import as_quantized
from everyframe.precision.upcast import as_exact_as, as_raised
from everyframe.runtime.memory.prefetch import LocalWeightsProvider, Prefetcher, WeightsProvider

#: Maximum share of all parameters in a unit, if its submodules allow it.
_SHARE = 1 / 12


def units(module: nn.Module) -> dict[str, nn.Module]:
    """Offload units (disjoint submodules, each at most 1/12 of all parameters if possible) by name.

    They depend on the module's structure and sizes, never on a device. A module that calls its
    layers piecemeal, and so more or less often, sets `comes_whole` and is one unit.
    """
    limit = _count(module) * _SHARE
    return dict(_split(module, "", limit))


def unit_parameters(module: nn.Module) -> frozenset[str]:
    """Dotted names of the parameters in units."""
    return frozenset(
        f"{unit}.{name}"
        for unit, part in units(module).items()
        for name, _ in part.named_parameters(remove_duplicate=False)
    )


def resident_bytes(module: nn.Module, precision: Precision) -> int:
    """Maximum bytes of parameters on the device while `module` is offloaded.

    Two units count, the largest and the next largest: one computes, one is being copied.
    """
    of_units, rest = unit_bytes(module, precision)
    return rest + sum(sorted(of_units.values())[-2:])


def unit_bytes(module: nn.Module, precision: Precision) -> tuple[dict[str, int], int]:
    """Bytes of each unit's parameters by unit name, and bytes outside units."""
    with as_quantized(module, precision):
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
    """Provider of weights in host memory. It copies even if the device is the host."""

    def bring(name: str, waiting: nn.Parameter) -> Tensor:
        return torch.empty_like(waiting, device=device).copy_(waiting)

    return LocalWeightsProvider(bring, device)


def from_files(
    weights: TensorFile, sources: Mapping[str, str], device: torch.device
) -> LocalWeightsProvider:
    """Provider that reads parameters from their files at each call.

    `sources` maps module names to file names. No copy stays in memory: the module's own parameters
    are on meta.
    """

    def bring(name: str, waiting: nn.Parameter) -> Tensor:
        return as_raised(weights.load(sources[name], device), waiting)

    return LocalWeightsProvider(bring, device)


class BlockOffload:
    """Block offload that `apply` adds to a module; `remove` leaves the weights offloaded.

    `most_bytes` is the peak of unit parameters on the device so far, prefetched ones included.
    """

    def __init__(self, module: nn.Module, device: torch.device, provider: WeightsProvider) -> None:
        self._handles: list[RemovableHandle] = []
        self._waiting: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._names = WeakKeyDictionary({part: name for name, part in module.named_modules()})
        found = units(module)
        self._ahead = Prefetcher(provider, list(found))
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
        """Remove the hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._ahead.forget()

    def _hook(self, part: nn.Module) -> None:
        mine: list[tuple[nn.Module, int]] = []

        # The hooks get the module as an argument: holding it would be a reference cycle.
        def come(part: nn.Module, *_: object) -> None:
            # Weights loaded with an enclosing unit stay until it is freed.
            layers = [each for each in part.modules() if each not in self._waiting]
            wanted = [(each, _own(each)) for each in layers if _has_own(each)]
            if not wanted:
                return
            named = {
                self._dotted_name(layer, name): parameter
                for layer, own in wanted
                for name, parameter in own.items()
            }
            came = self._ahead.take(self._names[part], named)
            for layer, own in wanted:
                self._waiting[layer] = own
                size = 0
                for name, parameter in own.items():
                    tensor = came[self._dotted_name(layer, name)]
                    layer._parameters[name] = _for(parameter, tensor)
                    # Already on the device.
                    size += 0 if tensor.data_ptr() == parameter.data_ptr() else tensor.nbytes
                mine.append((layer, size))
                self._bytes += size
            following = self._ahead.following(self._names[part])
            if following is not None:
                self._ahead.send_for(following, self._parameters_of(following))
            self.most_bytes = max(self.most_bytes, self._bytes + self._ahead.num_bytes)

        def go(*_: object) -> None:
            while mine:
                layer, size = mine.pop()
                layer._parameters.update(self._waiting.pop(layer))
                self._bytes -= size

        for hook in (come, go):
            vars(hook)["moves_weights"] = True  # see `fast_paths.compilation.block_state`
        self._handles.append(part.register_forward_pre_hook(come, prepend=True))
        self._handles.append(part.register_forward_hook(go, always_call=True))

    def _parameters_of(self, part: str) -> dict[str, nn.Parameter]:
        """The offloaded parameters of that submodule, by name."""
        module = next((each for each, name in self._names.items() if name == part), None)
        if module is None:
            return {}
        layers = (layer for layer in module.modules() if layer not in self._waiting)
        return {
            self._dotted_name(layer, name): parameter
            for layer in layers
            for name, parameter in _own(layer).items()
        }

    def _dotted_name(self, layer: nn.Module, name: str) -> str:
        """Dotted name of a parameter in the whole module."""
        return f"{self._names[layer]}.{name}".lstrip(".")


def apply(
    module: nn.Module, device: str | torch.device, provider: WeightsProvider | None = None
) -> BlockOffload:
    """Offload a module that computes on `device`; `provider` brings its weights (default: host)."""
    device = torch.device(device)
    return BlockOffload(module, device, provider or from_host(device))


def _has_own(layer: nn.Module) -> bool:
    return any(each is not None for each in layer._parameters.values())


def _own(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in layer._parameters.items() if each is not None}


def _for(waiting: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """The parameter that replaces an offloaded one during its call."""
    return as_exact_as(waiting, nn.Parameter(tensor.detach(), requires_grad=False))


def _split(module: nn.Module, name: str, limit: float) -> Iterator[tuple[str, nn.Module]]:
    children = [(key, child) for key, child in module.named_children() if _count(child)]
    leaf = not children or isinstance(module, nn.MultiheadAttention)
    leaf = leaf or getattr(module, "comes_whole", False)
    # Containers are never called, so they can't be units.
    is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    if name and (leaf or (_count(module) <= limit and not is_container)):
        yield name, module
        return
    for key, child in children:
        yield from _split(child, f"{name}.{key}" if name else key, limit)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class ModelOffload:
    """Whole-module offload that `take_turns` adds; `remove` leaves the weights on the host.

    `most_bytes` is the peak of the modules' parameters on the device so far.
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
                # An autoencoder's `decode` calls its submodules, not the module itself.
                hook = part.register_forward_pre_hook(self._coming(module), prepend=True)
                self._handles.append(hook)

    def remove(self) -> None:
        """Remove the hooks. A second call does nothing."""
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

        vars(come)["moves_weights"] = True  # see `fast_paths.compilation.block_state`
        vars(come)["leave_device"] = self._leave  # see `precision.upcast`
        return come

    def _come(self, module: nn.Module | None) -> None:
        assert module is not None, "it is being called"
        copies: dict[int, nn.Parameter] = {}  # some have several names
        for part in module.modules():
            resident = {name: each for name, each in part._parameters.items() if each is not None}
            self._on_host[part] = resident
            for name, parameter in resident.items():
                if id(parameter) not in copies:
                    copies[id(parameter)] = _move(parameter, self._device)
                part._parameters[name] = copies[id(parameter)]
        self._here = module
        self.most_bytes = max(self.most_bytes, sum(each.nbytes for each in copies.values()))

    def _leave(self) -> None:
        for part, resident in self._on_host.items():
            part._parameters.update(resident)
        self._on_host, self._here = {}, None


def take_turns(modules: Iterable[nn.Module], device: str | torch.device) -> ModelOffload:
    """Keep modules on the host; each is copied to `device` as a whole when it is called."""
    return ModelOffload(modules, torch.device(device))


def _move(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Copy a parameter to the device, even if that is the host, because it is freed afterwards."""
    return _for(parameter, torch.empty_like(parameter, device=device).copy_(parameter))
