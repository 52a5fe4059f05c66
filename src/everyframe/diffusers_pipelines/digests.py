"""Digests of a loaded pipeline and of a call's inputs, which a resumed run compares.

A call's inputs are compared bit for bit. A pipeline is compared by what can be seen at little cost:
classes, configs, dtypes, shapes, hooks, and of each tensor up to `_MOST_SAMPLES` values. Read next:
`module_calls.py`, `loaded_pipeline.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Values of a tensor of a pipeline that enter its digest, evenly spaced.
_MOST_SAMPLES = 1 << 14
#: What a config says of where it came from, and not of what it is.
_OF_ORIGIN = {"_name_or_path", "name_or_path", "_commit_hash", "_diffusers_version",
              "transformers_version", "warnings_issued"}  # fmt: skip


def digest_call(name: str, args: Any, kwargs: Mapping[str, Any]) -> str:
    """The digest of a call of the component `name`: of every value of every tensor that it gets.

    Devices do not enter, and of objects that are no data only the class does.
    """
    hasher = hashlib.sha256()
    for part in _parts_of([name, args, kwargs]):
        hasher.update(part)
    return hasher.hexdigest()


def digest_pipeline(pipe: Any) -> dict[str, str]:
    """A digest of each component of a loaded pipeline by name, and of the ``pipeline`` itself.

    It sees other weights, also those of an adapter that is fused or added, dtypes, configs, hooks,
    patched methods, tiling. It does not see a few values changed of a large tensor, weights that
    are on no device (offloaded to a disk), or what a hook does.
    """
    device = str(getattr(pipe, "_execution_device", None) or getattr(pipe, "device", ""))
    found = {"pipeline": _digest([_kind(pipe), _config(pipe), device])}
    for name, part in pipe.components.items():
        said: list[Any] = [_kind(part), _config(part), _scalars(part)]
        said = [said, *_of_module(part)] if isinstance(part, nn.Module) else said[:2]
        found[name] = _digest([*said, getattr(part, "shift", None)])
    return found


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values, default=_said).encode()).hexdigest()


def _said(value: Any) -> Any:
    """What JSON can't hold, as something that it can."""
    if isinstance(value, torch.dtype):
        return str(value)
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else _kind(value)


def _kind(value: Any) -> str:
    """The class of a value, or the name of a function: addresses say nothing a process later."""
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
    """Of each module in it: its class, settings, hooks, patched methods and tensors."""
    for name, each in module.named_modules():
        hooks = [_kind(hook) for hook in _hooks(each)]
        yield [name, _kind(each), each.training, _scalars(each), hooks, *_tensors(each)]


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
    """Its public settings that are single values, or such by name: tiling, scales of adapters."""

    def is_single(value: Any) -> bool:
        return value is None or isinstance(value, (bool, int, float, str))

    return {
        name: value
        for name, value in getattr(part, "__dict__", {}).items()
        if not name.startswith("_")
        and name not in _OF_ORIGIN
        and (is_single(value) or (type(value) is dict and all(map(is_single, value.values()))))
    }


def _tensors(module: nn.Module) -> Iterator[Any]:
    own = {**module._parameters, **module._buffers}
    for name, tensor in own.items():
        if tensor is not None:
            yield [name, *(_of_weight(each) for each in _plain_tensors(tensor.detach()))]


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a tensor of a kind of its own (quantised weights) is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def _of_weight(tensor: Tensor) -> list[Any]:
    told: list[Any] = [str(tensor.dtype), [*tensor.shape]]
    if tensor.is_meta:
        return told
    return [*told, hashlib.sha256(_samples(tensor)).hexdigest()]


def _samples(tensor: Tensor) -> Any:
    """Values of the tensor, evenly spaced, all of a small one, as bytes."""
    flat = tensor.reshape(-1)
    # Odd, as a step that divides the length of a row would see one column alone.
    step = -(-flat.numel() // _MOST_SAMPLES) | 1
    return _bytes(flat[::step])


def _bytes(flat: Tensor) -> Any:
    """The values of a tensor of one dimension, one after the other."""
    # A copy, as one value of an expanded tensor is nothing that can be seen as bytes.
    own = flat.clone(memory_format=torch.contiguous_format)
    return own.view(torch.uint8).cpu().numpy()


# -------------------------------------------------------------------------------------------- calls


def _parts_of(value: Any) -> Iterator[Any]:
    """What a value is, in pieces that no other value has."""
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
