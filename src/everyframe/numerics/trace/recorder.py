"""Recorder: hooks on every module that fingerprint its inputs, weights and outputs.

Hooks are attached from outside and removable; results stay bit-identical. Fingerprints are computed
on the tensor's device and copied to the host 256 at a time. Inputs are recorded before the call, as
it may change them in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everyframe.core.errors import InputError, did_you_mean
from everyframe.numerics.trace.fingerprint import NUM_NUMBERS, fingerprint
from everyframe.numerics.trace.replay import pack, pack_call
from everyframe.numerics.trace.trace import Call, Kind, Trace, TracedModule, TracedTensor
from everyframe.precision.dtypes import dtype_name
from everyframe.precision.plain_tensors import plain_tensors

#: Fingerprints buffered on the device before one copy to the host.
_WAITING = 256


class Recorder:
    """Record modules from `watch` until `remove`; `trace` returns the recording.

    Between a module that `fuses_next` and the one that `is_fused` nothing is recorded: another
    machine may compute the two one after the other.
    `full` are names (component and dotted name) of modules whose inputs and outputs are stored
    whole. `held_in` gives the effective precision of a weight that was rounded and then widened.
    """

    def __init__(
        self, full: Sequence[str] = (), held_in: Callable[[Tensor], torch.dtype] | None = None
    ) -> None:
        self._full = tuple(full)
        self._held_in = held_in or (lambda tensor: tensor.dtype)
        self._handles: list[RemovableHandle] = []
        self._parts: dict[TracedModule, int] = {}
        self._calls: list[Call] = []
        self._seen: list[TracedTensor] = []
        self._prints = _Prints()
        self._open: list[tuple[int, nn.Module]] = []
        self._num_calls: Counter[int] = Counter()
        self._nth: Counter[int] = Counter()
        self._weighed: set[int] = set()
        self._saved: dict[int, Tensor] = {}
        self._arguments: dict[int, Any] = {}

    def watch(self, component: str, module: nn.Module) -> None:
        """Record a module and its submodules from now on.

        The same name may come again (a new clip).

        Raises `InputError` if this component lacks a module named in `full`.
        """
        # Lists of modules are never called themselves.
        modules = {
            name: inner
            for name, inner in module.named_modules()
            if not isinstance(inner, (nn.ModuleList, nn.ModuleDict))
        }
        names = [f"{component}.{name}" if name else component for name in modules]
        for wanted in self._full:
            if wanted.split(".")[0] == component and wanted not in names:
                hint = did_you_mean(wanted, names)
                raise InputError(f"the {component} has no module {wanted!r}{hint}")
        for name, inner in modules.items():
            new = TracedModule(component, name, type(inner).__name__)
            part = self._parts.setdefault(new, len(self._parts))
            is_full = new.name in self._full
            # After all other hooks, which may cast the inputs.
            before, after = self._make_pre_hook(part, is_full), self._make_hook(is_full)
            self._handles.append(inner.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(inner.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Remove all hooks. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def never_called(self) -> list[str]:
        """Modules named in `full` that were never called."""
        parts = list(self._parts)
        called = {parts[call.part].name for call in self._calls}
        return [name for name in self._full if name not in called]

    def trace(self, same: Mapping[str, str], about: Mapping[str, str], ended: str = "") -> Trace:
        """The recording so far; see `Trace` for `same`, `about` and `ended`."""
        rows, numbers = self._prints.all()
        seen = (
            TracedTensor(
                each.call, each.kind, each.name, each.dtype, each.shape, int(rows[each.row])
            )
            for each in self._seen
        )
        return Trace(
            dict(same), dict(about), tuple(self._parts), tuple(self._calls), tuple(seen), numbers,
            ended, dict(self._saved), dict(self._arguments),
        )  # fmt: skip

    def _make_pre_hook(self, part: int, is_full: bool) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return
            call = self._begun(part, module)
            if part not in self._weighed:
                self._weighed.add(part)
                for name, tensor in _weights(module):
                    pack(tensor, name, self._seer(call, "weight", keep=False))
            if getattr(module, "is_fused", False):
                return
            see = self._seer(call, "input", keep=is_full)
            arrangement = pack_call(module, args, kwargs, see)
            if is_full:
                self._arguments[call] = arrangement

        return before

    def _make_hook(self, is_full: bool) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            # The call ended before it reached our hook.
            if self._open and self._open[-1][1] is module:
                call, _ = self._open.pop()
                if getattr(module, "fuses_next", False):
                    return
                pack(result, "", self._seer(call, "output", keep=is_full))

        return after

    def _begun(self, part: int, module: nn.Module) -> int:
        """Start a call and return its index."""
        parent = self._open[-1][0] if self._open else -1
        if parent < 0:
            self._num_calls[part] += 1
            self._nth.clear()
        self._nth[part] += 1
        number = self._num_calls[part] if parent < 0 else self._calls[parent].number
        self._calls.append(Call(part, number, self._nth[part], parent))
        self._open.append((len(self._calls) - 1, module))
        return len(self._calls) - 1

    def _seer(self, call: int, kind: Kind, *, keep: bool) -> Callable[[str, Tensor], int]:
        def see(name: str, tensor: Tensor) -> int:
            row = self._prints.add(tensor)
            exact = self._held_in(tensor) if kind == "weight" else tensor.dtype
            dtype = dtype_name(exact)
            self._seen.append(TracedTensor(call, kind, name, dtype, tuple(tensor.shape), row))
            place = len(self._seen) - 1
            if keep:
                # A copy, because views may share memory that changes later.
                self._saved[place] = tensor.detach().to("cpu", copy=True).contiguous()
            return place

        return see


class _Prints:
    """Fingerprints: a buffer on the device, the rest on the host."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._here: list[npt.NDArray[np.floating[Any]]] = []
        self._num_rows = 0

    def add(self, tensor: Tensor) -> int:
        """Fingerprint a tensor and return its row."""
        self._waiting.append(fingerprint(tensor))
        self._num_rows += 1
        if len(self._waiting) >= _WAITING:
            self._bring()
        return self._num_rows - 1

    def all(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.floating[Any]]]:
        """Row of each fingerprint, and the table in which equal rows are stored once."""
        self._bring()
        if not self._here:
            return np.zeros(0, np.int64), np.zeros((0, NUM_NUMBERS), np.float32)
        table = np.ascontiguousarray(np.concatenate(self._here))
        # As bytes, so that NaN equals NaN.
        whole = table.view(np.dtype((np.void, table.shape[1] * table.itemsize))).ravel()
        _, first, rows = np.unique(whole, return_index=True, return_inverse=True)
        return rows.reshape(-1), table[first]

    def _bring(self) -> None:
        waiting, self._waiting = self._waiting, []
        by_device: dict[torch.device, list[int]] = {}
        for place, each in enumerate(waiting):
            by_device.setdefault(each.device, []).append(place)
        wide = any(each.dtype == torch.float64 for each in waiting)
        rows = np.empty((len(waiting), NUM_NUMBERS), np.float64 if wide else np.float32)
        for places in by_device.values():
            # float64 only on the host: some devices lack it.
            same = len({waiting[place].dtype for place in places}) == 1
            if same:
                rows[places] = torch.stack([waiting[place] for place in places]).cpu().numpy()
            else:
                for place in places:
                    rows[place] = waiting[place].cpu().numpy()
        if len(rows):
            self._here.append(rows)


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters and buffers, without those of its children."""
    for own in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        for name, tensor in own:
            yield from plain_tensors(tensor, name)
