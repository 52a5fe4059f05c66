"""Digests of a loaded pipeline and of a call's inputs, compared when a run is resumed.

Inputs of a call are compared bit for bit. A pipeline is compared by what is cheap to read:
classes, configs, dtypes, shapes, hooks, and up to `_MOST_SAMPLES` (16,384) values of each tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everyframe.diffusers_pipelines.calls.step_caches import describe_cache
from everyframe.diffusers_pipelines.calls.weight_hooks import tensors_on_disk
from everyframe.precision.plain_tensors import plain_tensors

#: Most values of one tensor that enter a pipeline's digest, evenly spaced.
_MOST_SAMPLES = 1 << 14
#: Config keys that describe the origin of a component and not its content.
_OF_ORIGIN = {"_name_or_path", "name_or_path", "_commit_hash", "_diffusers_version",
              "transformers_version", "warnings_issued"}  # fmt: skip


def digest_call(name: str, args: Any, kwargs: Mapping[str, Any]) -> str:
    """Digest of a call of the component `name`: every value of every input tensor.

    Devices are ignored. Objects that are not data enter with their class only.
    """
    hasher = hashlib.sha256()
    for part in _parts_of([name, args, kwargs]):
        hasher.update(part)
    return hasher.hexdigest()


def writable_state(args: Any, kwargs: Any) -> list[Any]:
    """What a call may write to: its tensors, and what the objects among its inputs hold.

    Such as a cache of keys and values that the call fills. Two of these are equal if no tensor in
    them was replaced or written to, and no other value changed. Tensors made in inference mode have
    no version, so writing to one of them is not seen.
    """
    return list(_writable([args, kwargs], set(), is_inside=False))


def _writable(value: Any, seen: set[int], *, is_inside: bool) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield _Same(value), None if value.is_inference() else value._version
    elif isinstance(value, (list, tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _writable(each, seen, is_inside=is_inside)
    elif not hasattr(value, "__dict__") or callable(value):
        if is_inside:
            yield value if isinstance(value, (bool, int, float, str)) else _kind(value)
    elif id(value) not in seen:
        seen.add(id(value))
        yield from _writable(vars(value), seen, is_inside=True)


class _Same:
    """A tensor that equals itself alone; the tensor is held, so no other one takes its place."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._tensor is other._tensor

    __hash__ = None  # type: ignore[assignment]


def digest_pipeline(pipe: Any) -> dict[str, str]:
    """Digest of each component of a loaded pipeline by name, and of the ``pipeline`` itself.

    Detects other weights (also of a fused or added adapter), dtypes, configs, hooks, step caches
    with their settings, patched methods and tiling. It misses a few changed values of a large
    tensor, weights that are on no device (offloaded to a disk), and the behaviour of other hooks.
    """
    device = str(getattr(pipe, "_execution_device", None) or getattr(pipe, "device", ""))
    found = {"pipeline": _digest([_kind(pipe), _config(pipe), device])}
    for name, part in pipe.components.items():
        found[name] = digest_component(part)
    return found


def digest_component(part: Any) -> str:
    """Digest of one component; see `digest_pipeline`."""
    values: list[Any] = [_kind(part), _config(part), _scalars(part)]
    values = [values, *_of_module(part)] if isinstance(part, nn.Module) else values[:2]
    cache = describe_cache(part)
    return _digest([*values, getattr(part, "shift", None), *([cache] if cache else [])])


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values, default=_jsonable).encode()).hexdigest()


def _jsonable(value: Any) -> Any:
    """Convert a value that JSON can't hold."""
    if isinstance(value, torch.dtype):
        return str(value)
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else _kind(value)


def _kind(value: Any) -> str:
    """Class of a value or name of a function; addresses differ between processes."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


# ---------------------------------------------------------------------------------------- pipelines


def _config(part: Any) -> Any:
    config: Any = getattr(part, "config", None)
    if hasattr(config, "to_dict"):
        config = {**config.to_dict(), "attention": getattr(config, "_attn_implementation", None)}
    if not isinstance(config, Mapping):
        return None
    return {str(name): value for name, value in config.items() if name not in _OF_ORIGIN}


def _of_module(module: nn.Module) -> Iterator[Any]:
    """For each submodule, by name: class, settings, hooks, patched methods and tensors."""
    on_disk = tensors_on_disk(module)
    # Not in their order: cache-dit puts blocks back behind the other children after each call.
    for name, each in sorted(module.named_modules()):
        hooks = [_kind(hook) for hook in _hooks(each)]
        facts = [name, _kind(each), each.training, {**_scalars(each), **_adapters(each)}, hooks]
        yield [*facts, *_tensors(each, on_disk)]


def _adapters(module: nn.Module) -> dict[str, Any]:
    """Which of its adapters a layer of peft uses, and whether any; it has that in private names."""
    own = vars(module)
    if "_active_adapter" not in own:
        return {}
    active = own["_active_adapter"]
    names = [active] if isinstance(active, str) else list(active)
    return {"active": names, "disabled": own.get("_disable_adapters", False)}


def _hooks(module: nn.Module) -> Iterator[Any]:
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()
    patched = (value for name, value in sorted(vars(module).items()) if callable(value))
    yield from (each for each in patched if not isinstance(each, (nn.Module, Tensor)))
    # Of diffusers and of accelerate.
    registry = getattr(module, "_diffusers_hook", None)
    yield from getattr(registry, "hooks", {}).values()
    if hasattr(module, "_hf_hook"):
        yield module._hf_hook


def _scalars(part: Any) -> dict[str, Any]:
    """Public attributes that are scalars, or dicts of scalars: tiling, adapter scales."""

    def is_single(value: Any) -> bool:
        return value is None or isinstance(value, (bool, int, float, str))

    return {
        name: value
        for name, value in getattr(part, "__dict__", {}).items()
        if not name.startswith("_")
        and name not in _OF_ORIGIN
        and (is_single(value) or (type(value) is dict and all(map(is_single, value.values()))))
    }


def _tensors(module: nn.Module, on_disk: Collection[int]) -> Iterator[Any]:
    own = {**module._parameters, **module._buffers}
    for name, tensor in own.items():
        if tensor is not None:
            is_known = id(tensor) not in on_disk
            held = (each for _, each in plain_tensors(tensor.detach(), name))
            yield [name, *(_of_weight(each, is_known) for each in held)]


def _of_weight(tensor: Tensor, is_known: bool) -> list[Any]:
    facts: list[Any] = [str(tensor.dtype), [*tensor.shape]]
    if tensor.is_meta or not is_known:
        return facts
    return [*facts, hashlib.sha256(_samples(tensor)).hexdigest()]


def _samples(tensor: Tensor) -> Any:
    """Evenly spaced values of the tensor as bytes; all values of a small one."""
    flat = tensor.reshape(-1)
    # Odd, as a step that divides the length of a row would see one column alone.
    step = -(-flat.numel() // _MOST_SAMPLES) | 1
    return _bytes(flat[::step])


def _bytes(flat: Tensor) -> Any:
    """The values of a 1-D tensor as bytes."""
    # A copy, as one value of an expanded tensor is nothing that can be seen as bytes.
    own = flat.clone(memory_format=torch.contiguous_format)
    return own.view(torch.uint8).cpu().numpy()


# -------------------------------------------------------------------------------------------- calls


def _parts_of(value: Any) -> Iterator[Any]:
    """Encode a value as byte chunks that no other value has."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {[*value.shape]};".encode()
        yield b"" if value.is_meta else _bytes(value.detach().reshape(-1))
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape};".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)};".encode()
        for name, each in value.items():
            yield f"{len(str(name))} {name};".encode()
            yield from _parts_of(each)
    elif isinstance(value, (list, tuple)):
        yield f"list {len(value)};".encode()
        for each in value:
            yield from _parts_of(each)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield f"{type(value).__name__} {len(repr(value))} {value!r};".encode()
    else:
        yield f"{_kind(value)};".encode()
