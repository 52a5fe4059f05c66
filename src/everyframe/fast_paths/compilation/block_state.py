"""What a block computes with besides its tensors: classes, plain values, hooks.

A compiled block is one computation with everything of this baked in. `describe` turns it into plain
data whose digest is part of a package's key, and `StateWatch` notices any change of it between two
calls for some microseconds per submodule, so no compiled block is ever stale. Parameters and
buffers are inputs of a compiled block: only their dtypes, devices, sizes and strides matter here.
"""

from __future__ import annotations

import copy
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.fast_paths.compilation.called_functions import NamedValue, find_named_values
from everyframe.fast_paths.compilation.source_digest import digest, source_digest, source_files
from everyframe.precision.cast_hooks import is_cast_hook
from everyframe.precision.plain_tensors import is_plain


class NotCompilableError(Exception):
    """A block can't be exported to a package; the text says why."""


_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device,
    torch.memory_format, torch.layout, np.generic,
)  # fmt: skip

#: Attributes of every module that no call depends on, or that are described apart.
_BOOKKEEPING = frozenset({
    "_parameters", "_buffers", "_modules", "_compiled_call_impl", "_non_persistent_buffers_set",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_is_full_backward_hook", "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called", "forward",
})  # fmt: skip

#: In configs of diffusers, names of the values that nobody gave, in another order in each process.
_DEFAULTED = "_use_default_values"

_CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def is_transparent(patch: object) -> bool:
    """Whether a module or hook changes nothing now, as sequence parallelism of one rank."""
    return bool(getattr(getattr(patch, "__self__", patch), "is_transparent", False))


def only_watches(hook: object) -> bool:
    """Whether a hook of all modules reads their calls and changes nothing, as a worker's does."""
    return bool(getattr(getattr(hook, "__self__", hook), "only_watches", False))


def counts(hook: object) -> bool:
    """Whether a hook may change what a block computes; those of offload only bring its weights."""
    return not (is_transparent(hook) or getattr(hook, "moves_weights", False))


def is_stateless(value: object) -> bool:
    """Whether an object holds nothing and its class says so: its source is all that it computes."""
    return bool(getattr(type(value), "is_stateless", False)) and not vars(value)


def _by(own: Mapping[str, Any]) -> str:
    """What replaced the call of a module with these attributes, as far as they tell."""
    if names := ", ".join(getattr(own.get("_diffusers_hook"), "hooks", ())):
        return f"hooks of diffusers (step cache, offloading or casts): {names}"
    return "offloading of accelerate" if "_hf_hook" in own else "another function"


class Description:
    """Plain data that describes a block, with what was read for it.

    Attributes:
        data: nested tuples of texts and numbers.
        containers: dictionaries and lists that were read; a change of one changes the data.
        calls: objects, and the name and function by which their classes answer calls.
        named: what functions of the block find by name.
        files: source files of the classes and functions.
    """

    def __init__(self) -> None:
        self.containers: dict[int, Any] = {}
        self.calls: list[tuple[object, str, Any]] = []
        self.files: set[str] = set()
        self.named: list[NamedValue] = []
        self._functions: list[types.FunctionType] = []
        self._classes: dict[type, None] = {}
        self._seen: dict[int, int] = {}
        self._held: list[object] = []  # so that no other object gets the id of one that was seen
        self.data: Any = None

    def read(self, block: nn.Module) -> None:
        """Read a block.

        Raises:
            NotCompilableError: something in it can't be described; what was read is watched still.
        """
        data = self._module(block, "", is_root=True)
        held: dict[int, Any] = {}
        while True:  # what such an object calls finds more by name
            self.named, files = find_named_values(self._functions, self._classes)
            self.named.sort(key=lambda each: each.description)
            new = [e for e in self.named if e.is_opaque and id(e.value) not in held]
            if not new:
                break
            for each in new:
                held[id(each.value)] = self._named(each)
        self.files |= files
        named = [(*each.description, held.get(id(each.value))) for each in self.named]
        self.data = (data, named)

    def _named(self, named: NamedValue) -> Any:
        """An object that code finds by name: a module such as an activation, which has no tensors.

        Raises:
            NotCompilableError: it is another, which may hold anything.
        """
        value = named.value
        if isinstance(value, nn.Module) and not own_tensors(value):
            return self._module(value, named.name)
        kind = type(value).__name__
        raise NotCompilableError(f"{named.name} is a {kind}, which can't be compared")

    def _module(self, module: nn.Module, name: str, *, is_root: bool = False) -> Any:
        if id(module) in self._seen:
            return ("again", self._seen[id(module)])
        own = vars(module)
        if is_transparent(module):
            self.containers[id(module._modules)] = module._modules
            return self._module(module.get_submodule("inner"), name, is_root=is_root)
        self._see(module)
        self.containers[id(own)] = own
        replaced = own.get("forward")
        # Removed hooks of diffusers leave the class's own there, bound to the module.
        if replaced is not None and getattr(replaced, "__func__", None) is not type(module).forward:
            raise NotCompilableError(f"the call of {name or 'the block'} is replaced by {_by(own)}")
        call = self._call(module, "forward", name)
        hooks: list[tuple[Any, ...]] = []
        for kind in _CALL_HOOKS:
            held = own[kind]
            self.containers[id(held)] = held
            # Hooks of the block itself run outside of what is compiled.
            if not is_root:
                hooks += [(kind, *self._hook(each, name)) for each in held.values() if counts(each)]
        values = [
            (key, self._value(value, f"{name}.{key}"))
            for key, value in own.items()
            if key not in _BOOKKEEPING
        ]
        self.containers[id(module._modules)] = module._modules
        children = [
            (key, child if child is None else self._module(child, f"{name}.{key}".lstrip(".")))
            for key, child in module._modules.items()
        ]
        return (self._class(type(module)), call, tuple(values), tuple(hooks), tuple(children))

    def _call(self, owner: object, name: str, place: str) -> Any:
        """What answers a call, of which somebody may set another on the class."""
        called = getattr(type(owner), name)
        self.calls.append((owner, name, called))
        if not isinstance(called, types.FunctionType) or called.__module__.startswith("torch."):
            return None
        return self._value(called, place)

    def _see(self, value: object) -> None:
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)

    def _hook(self, hook: object, name: str) -> tuple[Any, ...]:
        if not is_cast_hook(hook):
            kind = getattr(hook, "__qualname__", type(hook).__name__)
            raise NotCompilableError(f"a hook is on {name}: {kind}")
        return (self._value(hook, name),)

    def _class(self, cls: type) -> str:
        self._classes[cls] = None
        self.files |= source_files(cls)
        return f"{cls.__module__}.{cls.__qualname__}"

    def _value(self, value: Any, place: str) -> Any:
        if isinstance(value, _PLAIN):
            # Its type too: 1, 1.0 and True are equal, and compute different things.
            return (type(value).__name__, repr(value))
        if isinstance(value, enum.Enum):
            return (self._class(type(value)), value.name)
        if isinstance(value, type):
            return ("type", self._class(value))
        if isinstance(value, Tensor):
            raise NotCompilableError(f"{place} is a tensor, but no parameter or buffer")
        if isinstance(value, nn.Module):
            return self._module(value, place)
        if id(value) in self._seen:
            return ("again", self._seen[id(value)])
        self._see(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            if isinstance(value, (list, set)):
                self.containers[id(value)] = value
            items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            return (type(value).__name__, *(self._value(each, place) for each in items))
        if isinstance(value, Mapping):
            self.containers[id(value)] = value
            pairs = (
                (repr(key), self._value(each, place))
                for key, each in value.items()
                if key != _DEFAULTED
            )
            return (type(value).__name__, *pairs)
        return self._object(value, place)

    def _object(self, value: Any, place: str) -> Any:
        if isinstance(value, functools.partial):
            parts = (value.func, list(value.args), dict(value.keywords))
            return ("partial", *(self._value(each, place) for each in parts))
        if isinstance(value, types.MethodType):
            # A module's own method is of the module, which is described where it stands.
            owner, called = value.__self__, value.__func__
            name = getattr(called, "__qualname__", None)  # torchao binds partials
            return (name or self._value(called, place), self._value(owner, place))
        if isinstance(value, types.FunctionType):
            self._functions.append(value)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            extra = (cells, list(value.__defaults__ or ()), dict(value.__kwdefaults__ or {}))
            name = f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
            return (name, *(self._value(each, place) for each in extra))
        if isinstance(value, types.BuiltinFunctionType) or not hasattr(value, "__dict__"):
            if isinstance(value, types.BuiltinFunctionType) and value.__module__:
                return (f"{value.__module__}.{value.__qualname__}",)
            raise NotCompilableError(
                f"{place} is a {type(value).__name__}, which can't be compared"
            )
        own = vars(value)
        self.containers[id(own)] = own
        call = self._call(value, "__call__", place) if callable(value) else None
        pairs = ((key, self._value(each, place)) for key, each in own.items())
        return (self._class(type(value)), call, *pairs)


class StateWatch:
    """Notices that what a `Description` has read is not the same any more.

    Compares by identity: a value that was replaced by an equal one counts as a change.
    """

    def __init__(self, description: Description) -> None:
        self._calls, self._named = description.calls, description.named
        held = description.containers.values()
        # Most are empty, such as hooks, and one pass over their lengths does for all of those.
        self._empty = [each for each in held if not each]
        self._maps = [
            (each, tuple(each.keys()), tuple(each.values()))
            for each in held
            if each and isinstance(each, Mapping)
        ]
        self._lists = [
            (each, tuple(each)) for each in held if each and not isinstance(each, Mapping)
        ]

    def is_unchanged(self) -> bool:
        """Whether every container still holds the very same objects."""
        if any(map(len, self._empty)):
            return False
        if any(getattr(type(owner), name) is not called for owner, name, called in self._calls):
            return False
        if not all(each.is_unchanged() for each in self._named):
            return False
        for each, keys, values in self._maps:
            if len(each) != len(keys) or not all(map(is_, each.values(), values)):
                return False
            if not all(map(is_, each, keys)):
                return False
        return all(
            len(each) == len(items) and all(map(is_, each, items)) for each, items in self._lists
        )


def own_tensors(block: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a block by dotted name, each tensor once."""
    found: dict[str, Tensor] = dict(block.named_parameters())
    found.update(block.named_buffers())
    return found


def copy_with(block: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a block with other tensors for its own, without what changes nothing (offload)."""
    memo: dict[int, Any] = {}
    for each in own_tensors(block).values():
        made = change(each.detach())
        is_parameter = isinstance(each, nn.Parameter)
        memo[id(each)] = nn.Parameter(made, requires_grad=False) if is_parameter else made
    for part in block.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            owner = getattr(hook, "__self__", hook)
            memo[id(owner)] = owner  # it may hold a whole model
    for part in block.modules():
        if is_transparent(part):
            memo[id(part)] = copy.deepcopy(part.get_submodule("inner"), memo)
    copied: nn.Module = copy.deepcopy(block, memo)
    for part in copied.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if not counts(hook)]:
                del hooks[key]
    return copied


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Dtype, device, sizes, strides, own class: what compiled code of a weight depends on."""
    own = () if is_plain(tensor) else (type(tensor),)  # a quantizer's, whose numbers are others
    return (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), *own)


def flatten(value: Any, tensors: list[Tensor]) -> Any:
    """Append the tensors of a structure to `tensors`, in the order of `cast_hooks.map_tensors`.

    Returns:
        the structure without its tensors, as hashable data.

    Raises:
        NotCompilableError: something in it is neither a tensor nor plain data.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if is_dataclass(value) and not isinstance(value, type):
        held: Iterator[Any] = (getattr(value, each.name) for each in fields(value) if each.init)
        return (type(value), *(flatten(each, tensors) for each in held))
    if isinstance(value, (tuple, list)):
        return (type(value), *(flatten(each, tensors) for each in value))
    if isinstance(value, Mapping):
        return (dict, *((key, flatten(each, tensors)) for key, each in value.items()))
    if isinstance(value, enum.Enum):
        return (type(value), value.name)
    if is_stateless(value):
        return (type(value), _class_source(value.__class__))
    raise NotCompilableError(f"an argument is a {type(value).__name__}")


@functools.cache
def _class_source(cls: type) -> str:
    return source_digest(source_files(cls))


@dataclass
class BlockState:
    """What was baked in when a block was described last, and its tensors then."""

    key: str = ""
    why_not: str = ""
    watch: StateWatch | None = None
    places: list[tuple[dict[str, Tensor | None], tuple[str, ...]]] = field(default_factory=list)
    layouts: list[Any] = field(default_factory=list)
    twins: list[tuple[int, int]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)


def describe(block: nn.Module) -> BlockState:
    """The state of a block as it is now."""
    description = Description()
    state = BlockState()
    try:
        description.read(block)
    except NotCompilableError as error:
        state.why_not = str(error)
    state.watch = StateWatch(description)
    names: list[tuple[str, Tensor | None]] = []
    for prefix, part in block.named_modules():
        for held in (part._parameters, part._buffers):
            state.places.append((held, tuple(held)))
            names += [(f"{prefix}.{key}", each) for key, each in held.items()]
    state.layouts = [each if each is None else layout_of(each) for _, each in names]
    seen: dict[int, int] = {}
    for number, (_, each) in enumerate(names):
        if each is None:
            continue
        if id(each) in seen:
            state.twins.append((seen[id(each)], number))
        else:
            seen[id(each)] = number
    # As `own_tensors` orders them: all parameters, then all buffers.
    is_buffer = [held is part._buffers for part in block.modules()
                 for held in (part._parameters, part._buffers) for _ in held]  # fmt: skip
    state.first = sorted(seen.values(), key=lambda number: is_buffer[number])
    layouts = [(name, layout) for (name, _), layout in zip(names, state.layouts, strict=True)]
    state.key = digest((description.data, layouts, state.twins, source_digest(description.files)))
    return state
