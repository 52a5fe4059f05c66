"""Registry of fast paths, as data: names, devices, exactness.

Imports no torch, so plans and the command line can use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from everyframe.core.errors import InputError, did_you_mean
from everyframe.core.facts import DeviceFacts
from everyframe.core.quality import METHODS

#: Environment variable: comma-separated names of fast paths that are off in every run.
DISABLE_VARIABLES = ("EVERYFRAME_DISABLE", "EVERYFRAME_WITHOUT")

#: Attention kernel that needs no certificate; see `everyframe.ops.attention`.
PLAIN = "math"

#: bfloat16 in the decoder alone of an autoencoder that is made for float32.
BF16_DECODER = "bf16-decoder"

_ATTENTION = "attention-"


@dataclass(frozen=True)
class FastPath:
    """A faster replacement of plain torch.

    Attributes:
        name: as in the catalogue.
        title: description.
        group: paths that replace the same thing.
        kinds: torch device types that have it.
        trial: function, as ``module:name``, that makes comparisons from a `CertificationTarget`.
        uses: tags of known issues about it.
        closeness: "exact" if results equal plain torch to the bit, which trials check; "lossy" of
            products in fewer bits, else "rounding".
        at_once: tried in the first run of a plan, from the sizes of its dry run alone.
        on_demand: tried only on request.
        in_long_runs: tried before a run that computes for many minutes, alone or with past ones.
        rivals: paths of the same modules, which trials of modules compare it with.
        needs_c: computed by our kernels in C, which a compiler has to make.
    """

    name: str
    title: str
    group: str
    kinds: tuple[str, ...]
    trial: str
    uses: tuple[str, ...] = ()
    closeness: Literal["exact", "rounding", "lossy"] = "rounding"
    at_once: bool = False
    on_demand: bool = False
    needs_c: bool = False
    in_long_runs: bool = False
    rivals: tuple[str, ...] = ()


_TRIALS = "everyframe.fast_paths.certification.trials"
_ATTENTION_TRIALS = "everyframe.fast_paths.certification.attention_trial"
_ANY = ("cpu", "cuda", "mps", "xpu")

_ALL = (
    FastPath("attention-flash", "attention in blocks, without the whole score matrix",
             "attention", ("cpu", "cuda"), f"{_ATTENTION_TRIALS}:attention",
             uses=("attention:flash",), at_once=True),
    FastPath("attention-efficient", "attention in blocks, by the kernel of xFormers",
             "attention", ("cuda",), f"{_ATTENTION_TRIALS}:attention",
             uses=("attention:efficient",), at_once=True),
    FastPath("attention-cudnn", "attention by cuDNN",
             "attention", ("cuda",), f"{_ATTENTION_TRIALS}:attention",
             uses=("attention:cudnn",), at_once=True),
    FastPath("bf16", "bfloat16 where the plan's islands allow it",
             "precision", _ANY, f"{_TRIALS}:precision",
             uses=("dtype:bfloat16",), at_once=True),
    FastPath("fp16", "float16 where the plan's islands allow it",
             "precision", ("cuda", "mps", "xpu"), f"{_TRIALS}:precision",
             uses=("dtype:float16",), at_once=True),
    FastPath(BF16_DECODER, "decoders of frames in bfloat16, checked against float32 in each video",
             "precision", ("cpu",), f"{_TRIALS}:precision",
             uses=("dtype:bfloat16",), at_once=True),
    FastPath("linear-gelu", "a linear layer and the GELU after it in one kernel of oneDNN",
             "linear-gelu", ("cpu",), f"{_TRIALS}:block"),
    FastPath("native-norm", "group norm with SiLU, layer and RMS norm by a kernel in C",
             "norm", ("cpu",), f"{_TRIALS}:norms", needs_c=True, in_long_runs=True),
    FastPath("native-gate", "modulation, gated and mixed branches of a stream in one pass, in C",
             "gate", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True),
    FastPath("native-rope", "rotary position embedding by a kernel in C",
             "rope", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True),
    FastPath("native-gelu", "GELU by a kernel in C",
             "linear-gelu", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True),
    FastPath("native-geglu", "the gated GELU of feed-forwards by a kernel in C",
             "geglu", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True),
    FastPath("native-attention", "attention over few frames by a kernel in C",
             "frame-attention", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True),
    FastPath("native-flash", "attention in blocks by a kernel in C",
             "block-attention", ("cpu",), f"{_ATTENTION_TRIALS}:native", needs_c=True,
             in_long_runs=True, rivals=("attention-flash",)),
    FastPath("onednn-linear", "linear layers by oneDNN, with the bias in the product",
             "linear", ("cpu",), f"{_TRIALS}:modules", in_long_runs=True),
    FastPath("native-gated-linear", "a linear layer and its gated GELU in one kernel in C",
             "gated-linear", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True,
             rivals=("onednn-linear", "native-geglu")),
    FastPath("temporal-conv", "convolutions over time as ones of two dimensions",
             "temporal-conv", ("cpu",), f"{_TRIALS}:modules", in_long_runs=True),
    FastPath("temporal-winograd", "convolutions over time with half of the multiplications, in C",
             "temporal-winograd", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True,
             rivals=("temporal-conv",)),
    FastPath("channels-last", "convolution weights in memory as oneDNN reads them",
             "convolution", ("cpu",), f"{_TRIALS}:modules", in_long_runs=True),
    FastPath("winograd", "convolutions of 3x3 with a quarter of the multiplications, in C",
             "winograd", ("cpu",), f"{_TRIALS}:modules", needs_c=True, in_long_runs=True,
             rivals=("channels-last",)),
    FastPath("kept-embeddings", "cached embeddings of repeated numbers",
             "embeddings", ("cpu",), f"{_TRIALS}:embeddings", closeness="exact"),
    FastPath("int8-dynamic", "products of linear layers in int8, by torchao",
             "products", ("cpu", "cuda"), f"{_TRIALS}:modules",
             closeness="lossy", on_demand=True),
    FastPath("fp8-scaled", "products of linear layers in fp8, by torchao",
             "products", ("cuda",), f"{_TRIALS}:modules",
             closeness="lossy", on_demand=True),
    FastPath("cached-constants", "keys and values of prompts and tables of positions, once a video",
             "constants", ("cpu",), "everyframe.fast_paths.certification.constant_trial:constants",
             closeness="exact", in_long_runs=True),
    FastPath("compile", "blocks compiled ahead of time, or by torch.compile",
             "compile", ("cpu", "cuda"), f"{_TRIALS}:compiled",
             uses=("compiler:inductor",), on_demand=True),
)  # fmt: skip

#: All fast paths by name.
CATALOGUE: Mapping[str, FastPath] = {path.name: path for path in _ALL}

#: Paths that swap linear layers, of which quantized weights leave none.
OF_LAYERS = ("linear-gelu", "onednn-linear", "native-gated-linear")

#: Dtype of each path in the precision group.
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", BF16_DECODER: "bfloat16"}


def for_device(device: DeviceFacts) -> tuple[FastPath, ...]:
    """Fast paths of this kind of device."""
    return tuple(path for path in CATALOGUE.values() if device.kind in path.kinds)


def kernels_for(device: DeviceFacts) -> tuple[str, ...]:
    """Attention kernels of this kind of device, the plain one last."""
    return (*(kernel_of(path.name) or "" for path in for_device(device) if kernel_of(path.name)),
            PLAIN)  # fmt: skip


def kernel_of(name: str) -> str | None:
    """``flash`` for ``attention-flash``; None for a path that is not attention."""
    return name.removeprefix(_ATTENTION) if name.startswith(_ATTENTION) else None


def kernel_used(paths: Sequence[str]) -> str:
    """Attention kernel selected by these paths; the plain one by default."""
    return next((kernel for each in paths if (kernel := kernel_of(each))), PLAIN)


def path_of_kernel(kernel: str) -> str:
    """``attention-flash`` for ``flash``."""
    return f"{_ATTENTION}{kernel}"


def check_kernel(given: str, device: DeviceFacts) -> str:
    """Validate the name of an attention kernel of that device, and normalise it.

    Raises:
        InputError: unknown on that device; lists the allowed names.
    """
    wanted = given.strip().casefold()
    known = kernels_for(device)
    if wanted not in known:
        raise InputError(
            f"attention must be one of {', '.join(known)} on {device.name}, got {given!r}"
            f"{did_you_mean(wanted, known)}"
        )
    return wanted


def switched_off(asked: Iterable[str]) -> frozenset[str]:
    """Fast paths and lossy methods that are off: requested, or in ``EVERYFRAME_DISABLE``.

    Without ``bf16``, decoders don't use it either.
    ``EVERYFRAME_WITHOUT`` is the variable's earlier name.

    Raises:
        InputError: unknown path; suggests the nearest name.
    """
    off, known = set(), {**CATALOGUE, **METHODS}
    for place, names in (("disable", asked), *map(_in_variable, DISABLE_VARIABLES)):
        for name in names:
            wanted = name.strip().casefold()
            if wanted not in known:
                raise InputError(
                    f"{place}: there is no fast path {name!r} among {', '.join(known)}"
                    f"{did_you_mean(wanted, known)}"
                )
            off.add(wanted)
    return frozenset(off | {BF16_DECODER} if "bf16" in off else off)


def _in_variable(variable: str) -> tuple[str, list[str]]:
    given = os.environ.get(variable, "")
    return variable, [name for name in given.split(",") if name.strip()]
