"""Snapshot of a loaded component, to detect and undo what a run changes.

The snapshot holds every submodule's class, weights, hooks, children and attributes. `restore`
undoes replacements and additions, and names what it can't undo, such as a write to weights; that
component must be loaded again. Weights are unchanged if they are the same tensors in the same
memory with the same version counter. Inference tensors have none, so no component is loaded in
inference mode.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from everyframe.fast_paths.modules.fast_modules import forget

#: Attributes of every module that hold a table of torch's own: hooks, children, weights.
_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
#: Not compared: a compiled block adds packages per input size, which change no result.
_COMPILED = "_compiled_call_impl"
#: Types compared by value.
_PLAIN = (bool, int, str, bytes, complex, torch.dtype, torch.device, torch.Size, type)
_OPAQUE = (nn.Module, FunctionType, BuiltinFunctionType, MethodType)
#: Depth to which containers and plain objects are compared.
_DEPTH = 8


class ComponentState:
    """Snapshot of a component that was just loaded."""

    def __init__(self, module: nn.Module) -> None:
        self._root, seen = module, set[int]()
        self._parts = [(name, _PartState(part, seen)) for name, part in module.named_modules()]
        tensors = [*module.parameters(), *module.buffers()]
        #: Bytes of all weights and buffers, those with several names once.
        self.num_bytes = sum({each.data_ptr(): each.nbytes for each in tensors}.values())

    def restore(self) -> str:
        """Put back what was replaced or added; names what can't be put back, else an empty text."""
        forget(self._root)
        seen = set[int]()
        for name, part in self._parts:
            found = part.restore(seen)
            if found:
                return f"{name}: {found}" if name else found
        return ""


class _PartState:
    """One submodule: its class, the entries of its tables, and its other attributes."""

    def __init__(self, part: nn.Module, seen: set[int]) -> None:
        self._part, self._class, own = part, type(part), vars(part)
        self._tables = {name: dict(own[name]) for name in own if name in _TABLES}
        self._rest = {name: value for name, value in own.items() if name not in _TABLES}
        self._entries = [
            (f"{table}: {name}", value)
            for table, entries in self._tables.items()
            for name, value in entries.items()
        ]
        self._others = [(k, value) for k, value in self._rest.items() if k != _COMPILED]
        self._known = self._describe_values(seen)

    def _describe_values(self, seen: set[int]) -> list[Hashable]:
        """Every value that was there at the snapshot, as it is now; entries of tables first."""
        moves = getattr(self._part, "moves_its_weight", False)
        entries = [
            _describe_tensor(value, moves=moves)
            if isinstance(value, Tensor)
            else _describe(value, seen)
            for _, value in self._entries
        ]
        return [*entries, *(_describe(value, seen) for _, value in self._others)]

    def restore(self, seen: set[int]) -> str:
        """See `ComponentState.restore`."""
        if type(self._part) is not self._class:
            return f"it is a {type(self._part).__name__} now"
        now = self._describe_values(seen)
        if now != self._known:
            names = [name for name, _ in (*self._entries, *self._others)]
            states = zip(names, self._known, now, strict=True)
            changed = next(name for name, known, found in states if found != known)
            return f"{changed} was changed"
        own = vars(self._part)
        for name, entries in self._tables.items():
            table: Any = own[name]
            table.clear()
            table.update(entries)
        for name in own.keys() - self._rest.keys() - self._tables.keys():
            del own[name]
        own.update(self._rest)
        return ""


def _describe_tensor(tensor: Tensor, *, moves: bool = False) -> Hashable:
    """Identity of a tensor's values; with `moves` wherever and in whichever order they lie."""
    version = None if tensor.is_inference() else tensor._version
    place = () if moves else (tensor.data_ptr(), tensor.stride())
    return id(tensor), version, tensor.dtype, tensor.device, tensor.shape, place


def _describe(value: object, seen: set[int], depth: int = _DEPTH) -> Hashable:
    """A value by what it holds, as far as that can be seen; each object is looked into once."""
    if value is None or isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float):
        return repr(value)  # not a number equals itself then
    if isinstance(value, Tensor):
        return _describe_tensor(value)
    if id(value) in seen or not depth or isinstance(value, _OPAQUE):
        return id(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_describe(each, seen, depth - 1) for each in value)
    seen.add(id(value))
    if isinstance(value, Mapping):
        pairs = ((_describe(k, seen, 1), _describe(v, seen, depth - 1)) for k, v in value.items())
        return type(value), tuple(pairs)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_describe(each, seen, 1) for each in value)
    own = getattr(value, "__dict__", None)
    return id(value), None if own is None else _describe(own, seen, depth - 1)
