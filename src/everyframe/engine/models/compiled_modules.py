"""Compile, save, load and quantize modules and pipelines in memory, in place.

A pipeline keeps its class, call, components and parameter names, and can be moved, cast, offloaded
and given LoRAs afterwards. `fast_paths/compilation/` compiles; runs of a plan do the same by
the fast path ``compile``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from everyframe.core.errors import EveryframeWarning, InputError, did_you_mean
from everyframe.core.options import shown
from everyframe.core.quality import PRODUCTS
from everyframe.diffusers_pipelines.calls.weight_hooks import weights_set_by
from everyframe.fast_paths.apply import block_names
from everyframe.fast_paths.compilation import package_store
from everyframe.fast_paths.compilation.module_compilation import compile_blocks, compiled_blocks
from everyframe.fast_paths.compilation.toolchain import why_not
from everyframe.precision import dynamic_quantization
from everyframe.precision.quantization import (
    QuantizedLinear,
    in_memory,
    quantize_layers,
    save_wide,
)

ModelT = TypeVar("ModelT")

#: Components of a pipeline that run at every step.
_DENOISERS = ("unet", "transformer", "controlnet", "prior")

#: Kinds of quantization: weights alone, and products.
_WEIGHTS = ("int8", "fp8")


def compile(  # noqa: A001 - as `torch.compile` is named
    model: ModelT, *, components: Sequence[str] | None = None, dynamic: bool = True
) -> ModelT:
    """Compile the blocks of a module, or of a pipeline's denoisers, in place.

    The first call of each kind of block takes seconds to minutes: it is compiled, and compared with
    the block as written; what isn't faster isn't used. Later processes load it in milliseconds. A
    block that can't be exported is compiled by torch.compile, or runs as written, with a warning in
    the log that says why. Blocks are used under ``torch.no_grad`` only, as pipelines do it.

    Args:
        model: a diffusers pipeline, or a module.
        components: names of the pipeline's components; by default those that run at every step.
        dynamic: one compiled block takes varying sizes where it can; otherwise each size has its
            own, which takes as long again and can be faster on a card.

    Returns:
        `model` itself.

    Raises:
        InputError: there is nothing to compile, or no compiler and nothing compiled before.
    """
    return _compile(model, components, dynamic=dynamic, compiles=True)


def save_compiled(model: Any, target: str | Path) -> Path:
    """Save the compiled blocks that were used so far in a folder, for `load_compiled`.

    It is for this device and this user: the folder holds native code, and another device has to
    compile it itself. Weights are not saved.

    Raises:
        InputError: nothing was compiled, with the reasons; or the folder holds something else.
    """
    blocks = [
        each for part in _parts(model, None).values() for each in compiled_blocks(part).values()
    ]
    if not blocks:
        raise InputError("this has no compiled blocks: everyframe.compile(...) comes first")
    packages = {name: each for block in blocks for name, each in block.report.packages.items()}
    if not packages:
        notes = sorted({note for block in blocks for note in block.report.notes})
        if not notes and any(block.is_compiled for block in blocks):
            notes = ["they run by torch.compile, whose code can't be saved"]
        message = "; ".join(notes or ["call it once, so that its blocks are compiled"])
        raise InputError(f"none of its blocks has compiled code: {message}")
    return package_store.save(packages.values(), target, title=type(model).__name__)


def load_compiled(
    target: str | Path, model: ModelT, *, components: Sequence[str] | None = None
) -> ModelT:
    """Use the compiled blocks of a folder; takes milliseconds, and nothing is compiled.

    Calls that the folder has nothing for run as written.

    Returns:
        `model` itself.

    Raises:
        InputError: not such a folder; or compiled by another device, user, torch or source.
    """
    parts = _parts(model, components)
    device = getattr(model, "_execution_device", None) or _device(parts)
    package_store.check(target, device)
    return _compile(model, components, dynamic=True, compiles=False)


def quantize(
    model: ModelT, kind: str = "int8", *, components: Sequence[str] | None = None
) -> ModelT:
    """Quantize the linear layers of a module, or of a pipeline's denoisers, in place.

    Args:
        model: a diffusers pipeline, or a module.
        kind: ``"int8"`` or ``"fp8"`` store the weights in eight bits and compute as before, on any
            device: half of the memory and no speed. ``"int8-dynamic"`` and ``"fp8-scaled"``
            multiply in eight bits by torchao: layers of sizes that are faster so on this device.
        components: names of the pipeline's components; by default those that run at every step.

    Returns:
        `model` itself.

    Raises:
        InputError: an unknown kind, or it is quantized already.
        MissingPackageError: torchao isn't installed.
    """
    kinds = (*_WEIGHTS, *PRODUCTS)
    if kind not in kinds:
        raise InputError(
            f"kind must be one of {', '.join(kinds)}, got {shown(kind)}{did_you_mean(kind, kinds)}"
        )
    parts = _parts(model, components)
    for name, part in parts.items():
        shown_name = name or "the module"
        if any(map(_is_quantized, part.modules())):
            raise InputError(f"{shown_name} is quantized already; load it again")
        if by := weights_set_by(part):
            raise InputError(f"{by} sets the weights of {shown_name} in each call; quantize first")
    for name, part in parts.items():
        if kind in _WEIGHTS:
            quantize_layers(part, in_memory(part, kind))
            # Files of its library, which has no layers of this kind.
            is_saved = hasattr(part, "save_pretrained")
            for layer in part.modules():
                if is_saved and isinstance(layer, QuantizedLinear):
                    layer.register_state_dict_post_hook(save_wide)  # type: ignore[no-untyped-call]
        else:
            for note in dynamic_quantization.quantize_products(part, kind):
                message = f"{name}: {note}" if name else note
                warnings.warn(message, EveryframeWarning, stacklevel=2)
        for layer in part.modules():
            inner = getattr(layer, "base_layer", None)
            if isinstance(inner, nn.Module) and _is_quantized(inner):
                layer.merge = _refuse_merge  # type: ignore[assignment]
    return model


def _refuse_merge(*_: object, **__: object) -> NoReturn:
    """In place of peft's, which adds nothing to codes, and can't add to torchao's tensors."""
    raise InputError(
        "no LoRA can be fused into quantized weights; fuse it before everyframe.quantize, or leave "
        "it beside them"
    )


def _is_quantized(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLinear) or dynamic_quantization.is_quantized(module)


def _compile(
    model: ModelT, components: Sequence[str] | None, *, dynamic: bool, compiles: bool
) -> ModelT:
    parts = _parts(model, components)
    missing = why_not() if compiles and _device(parts).type == "cpu" else None
    if missing is not None:
        raise InputError(f"compiling needs a compiler: {missing}")
    names = {name: block_names(part) for name, part in parts.items()}
    if not any(names.values()):
        found = ", ".join(type(part).__name__ for part in parts.values())
        raise InputError(f"{found} has no list of blocks that could be compiled")
    for name, part in parts.items():
        compile_blocks(part, names[name], dynamic=dynamic, compiles=compiles)
    return model


def _parts(model: Any, components: Sequence[str] | None) -> dict[str, nn.Module]:
    """The modules to work on, by name."""
    if isinstance(model, nn.Module):
        return {"": model}
    held = getattr(model, "components", None)
    named = held if isinstance(held, dict) else {}
    modules = {name: each for name, each in named.items() if isinstance(each, nn.Module)}
    if not modules:
        raise InputError(f"a module or a diffusers pipeline is needed, got {shown(model)}")
    if components is None:
        found = {name: each for name, each in modules.items() if name.startswith(_DENOISERS)}
        return found or modules
    for name in components:
        if name not in modules:
            raise InputError(
                f"this pipeline has no component {name!r} among {', '.join(modules)}"
                f"{did_you_mean(name, modules)}"
            )
    return {name: modules[name] for name in components}


def _device(parts: dict[str, nn.Module]) -> torch.device:
    devices = (each.device for part in parts.values() for each in part.parameters())
    return next(devices, torch.device("cpu"))
