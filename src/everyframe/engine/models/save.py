"""Save a model with merged or quantized weights as a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everyframe.core.errors import InputError
from everyframe.core.paths import expand_path
from everyframe.core.quality import PRODUCTS
from everyframe.core.request import DTYPES, Request
from everyframe.engine.models.saved_model import SavableNative
from everyframe.families.registry import check_option_names
from everyframe.planning.find_model import find_model
from everyframe.precision.dtypes import torch_dtype
from everyframe.runtime.components.patchable import patches_of
from everyframe.runtime.loading import check_contents
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.saved_checkpoint import SavableSpec, save_checkpoint

#: Options of a request that change weights.
_ALLOWED = ("model", "loras", "components", "quantize", "dtype")


def save(model: str | Path, output: str | Path, **options: Any) -> Path:
    """Write a model with its LoRAs merged, its components replaced or its weights quantized.

    The new folder loads as the old one does, and gives the bits that merging at each load gives. It
    appears whole or not at all.

    Args:
        model: a folder, or the hub id of a diffusers pipeline that is on this disk.
        output: the folder to write, which must not exist.
        options: `loras`, `components`, `quantize` (``"int8"`` or ``"fp8"``, of our own families),
            and `dtype`, in which changed weights are written (float32 by default, whose bits are
            right in each precision).

    Raises:
        InputError: the folder exists, nothing would change, or an option has no effect.
        CheckpointError: a file does not fit.
    """
    for name in options:
        if name not in _ALLOWED:
            raise InputError(f"{name} has no effect on a saved checkpoint; leave it out")
    request = Request(model=str(model), **options)
    check_option_names(request)
    found, _ = find_model(request, may_fetch=False)
    savable = SavableNative(found) if isinstance(found, NativeModelSpec) else found
    assert isinstance(savable, SavableSpec), "every family is one or the other"
    check_contents(found)
    patches_of(found).check()
    if request.quantize in PRODUCTS:
        raise InputError(
            f"quantize={request.quantize} is how products are computed, which no file holds; save "
            f"with {PRODUCTS[request.quantize]}, and run the folder with {request.quantize}"
        )
    kind = request.quantize if request.quantize in ("int8", "fp8") else ""
    dtype = None if request.dtype == "auto" else torch_dtype(DTYPES[request.dtype])
    folder = expand_path(output, "output")
    save_checkpoint(savable, folder, dtype, kind)
    return folder
