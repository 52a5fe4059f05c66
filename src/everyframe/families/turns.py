"""By turns: of several modules the one that is called is on the device, as a whole.

The others wait on the host. The arithmetic is the same, so the result is too, bit for bit; the
price is a way to the device for each change. Not here: one module block by block (`offload.py`).
Read next: `everyframe.families.pipeline.loading`, which puts it on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Turns:
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


def take_turns(modules: Iterable[nn.Module], device: str | torch.device) -> Turns:
    """Have modules, whose weights lie on the host, come to `device` one at a time as a whole."""
    return Turns(modules, torch.device(device))


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A copy on the device, made even where the device is the host: it is let go afterwards."""
    copy = torch.empty_like(parameter, device=device).copy_(parameter)
    return nn.Parameter(copy, requires_grad=False)
