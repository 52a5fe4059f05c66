"""Load one component of a plan: build it on meta, load it strictly, in the plan's precision.

Every family loads components through this module. Peak memory is one copy of the component in the
dtype that it runs in; `release_components` makes sure it is freed when its stage ends.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from everyframe.checkpoints.key_map import KeyMap
from everyframe.checkpoints.strict_load import check_strictly, load_strictly
from everyframe.checkpoints.tensor_file import TensorFile, open_checkpoint
from everyframe.core.plan import FLOAT32, PACKED, ComponentPlan, Precision
from everyframe.fast_paths.apply import apply_fast_paths, swap_modules
from everyframe.fast_paths.registry import BF16_DECODER
from everyframe.parallel.communicator import Communicator
from everyframe.precision import cast_hooks, quantization
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.islands import parameter_dtype
from everyframe.precision.packed_linear import PackedLinear
from everyframe.precision.quantization import (
    SCALE,
    QuantizedLinear,
    layers,
    quantize,
    swap,
    without_numbers,
)
from everyframe.precision.upcast import as_raised, has_float32
from everyframe.runtime.components.component_observers import notify_loaded
from everyframe.runtime.components.meta_init import ModuleT, build_on_meta
from everyframe.runtime.memory import offload
from everyframe.runtime.memory.prefetch import LocalWeightsProvider
from everyframe.runtime.memory.weight_sharding import ShardedWeightsProvider
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.repair import repairs


def fill(
    module: nn.Module,
    precision: Precision,
    weights: TensorFile,
    sources: Mapping[str, str],
    devices: tuple[torch.device, torch.device],
    left: Collection[str],
) -> None:
    """Replace the layers that store 8-bit weights by quantized ones.

    `sources` maps module names to file names. `devices` are where rows are quantized and where the
    result is stored; parameters in `left` stay in the file, and on meta in the module.
    """
    found = layers(module, precision)
    works, lies = devices
    # In the order of the file.
    for target, source in sources.items():
        name = target.removesuffix(".weight")
        if name not in found:
            continue
        if precision.weight_dtype == PACKED:
            dtype = torch_dtype(precision.parameters)
            swap(module, name, PackedLinear(weights.packed(source), found[name], dtype))
            continue
        layer = without_numbers(found[name], precision.weight_dtype)
        if target not in left:
            values, scale = _quantize(weights, source, precision.weight_dtype, works)
            layer = QuantizedLinear(
                precision.weight_dtype, values.to(lies), scale.to(lies), found[name].bias
            )
        swap(module, name, layer)


def _quantize(
    weights: TensorFile, source: str, kind: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a weight on `device`: as the file has them, else rounded here."""
    stored = weights.quantized(source, quantization.storage_of(kind))
    if stored is None:
        return quantize(weights.load(source), kind, device)
    return stored[0].to(device), stored[1].to(device)


def from_files(
    weights: TensorFile, sources: Mapping[str, str], device: torch.device, kind: str
) -> LocalWeightsProvider:
    """`offload.from_files` for a module with some 8-bit weights."""
    if not kind:
        return offload.from_files(weights, sources, device)
    scales: dict[str, Tensor] = {}

    def bring(name: str, waiting: nn.Parameter) -> Tensor:
        layer, _, own = name.rpartition(".")
        if own == SCALE and layer in scales:  # it came with the values
            return as_raised(scales.pop(layer), waiting)
        if own != SCALE and waiting.is_floating_point():
            return as_raised(weights.load(sources[name], device), waiting)
        values, scale = _quantize(weights, sources[f"{layer}.weight"], kind, device)
        if own == SCALE:
            return as_raised(scale, waiting)
        scales[layer] = scale
        return values

    return LocalWeightsProvider(bring, device)


_log = logging.getLogger(__name__)


#: Loaded modules that are still alive. Several runs may be active in several threads.
_LOADED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_LOCK = threading.Lock()


def load_component(
    component: ComponentPlan,
    build: Callable[[], ModuleT],
    weights: Path | TensorFile,
    keys: KeyMap,
    outputs: tuple[str, ...] = ("",),
    supply: Communicator | None = None,
) -> ModuleT:
    """Load one component with its weights onto its device, ready to call.

    `build` makes it without weights; `outputs` are the submodules whose results the engine
    receives (see `cast_hooks.add_cast_hooks`). `supply` are the ranks that shard the weights, if
    the plan shards any. Raises `CheckpointError` for a missing, extra or misshapen tensor.
    """
    module = build_on_meta(build)
    swap_modules(module, component.fast_paths)
    persistent = set(module.state_dict())
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    is_checked = BF16_DECODER in (component.fast_paths or ())
    read_in = FLOAT32 if is_checked else component.precision

    def dtype_of(name: str, own: torch.dtype) -> torch.dtype:
        # Buffers are tables and statistics: they stay as wide as they were made.
        if name not in parameters or name not in persistent:
            return own
        return torch_dtype(parameter_dtype(name, read_in))

    opened = open_checkpoint(weights)
    where = torch.device(component.device)
    device = torch.device("cpu") if component.block_offload else where
    rounded = quantization.rows(module, component.precision).keys()
    with quantization.as_quantized(module, component.precision):
        # Weights that arrive at each call, from a file or other ranks, are only checked here.
        leave = offload.unit_parameters(module) if component.from_disk else frozenset[str]()
        held = _shard_weights(module, component, supply)
        leave = leave if held is None else held.elsewhere
    left = load_strictly(
        module, opened, keys=keys, dtype=dtype_of, device=device, leave=leave | rounded
    )
    fill(module, component.precision, opened, left, (where, device), leave)
    module.eval().requires_grad_(False)
    track_component(module)
    hooks = cast_hooks.add_cast_hooks(
        module, component.precision, outputs, keeps_float32=is_checked
    )
    for repair in component.repairs:
        repairs.apply_repair(module, repair)
    if component.block_offload or held is not None:
        kind = component.precision.weight_dtype
        files = from_files(opened, left, where, kind) if component.from_disk else None
        offload.apply(module, where, held or files)
    apply_fast_paths(module, component.fast_paths, outputs, repairs.plain_parts(component.repairs))
    notify_loaded(component.name, module)
    _log.debug(
        "%s: %d parameters from %s on %s in %s, %d casts at module edges",
        component.name, component.num_parameters, opened.source, component.device,
        component.precision, hooks.num_hooks,
    )  # fmt: skip
    return module


def rewrite_parameters(
    component: ComponentPlan,
    weights: TensorFile,
    keys: KeyMap,
    module: nn.Module,
    names: Collection[str],
) -> bool:
    """Read these parameters of a loaded component again: the bits are those of a new component.

    False, and nothing is changed, if one does not have the numbers of its file alone: it is
    quantized, repaired or has them in two precisions.
    """
    if component.precision.weight_dtype or component.repairs or has_float32(module):
        return False
    parameters = dict(module.named_parameters(remove_duplicate=False))
    groups = {name: group for group in keys.tied for name in group}
    sources: dict[str, nn.Parameter] = {}
    for source in weights:
        target = keys.target(source) or ""
        for name in groups.get(target, (target,)):
            if name in names and name in parameters:
                sources[source] = parameters[name]
    found = {id(parameter) for parameter in sources.values()}
    if any(name not in parameters or id(parameters[name]) not in found for name in names):
        return False
    for source, parameter in sources.items():
        parameter.copy_(weights.load(source, parameter.device, parameter.dtype))
    return True


def _shard_weights(
    module: nn.Module, component: ComponentPlan, supply: Communicator | None
) -> ShardedWeightsProvider | None:
    """Provider of weights that ranks shard between them, if the plan shards any."""
    if component.num_weight_shards == 1:
        return None
    assert supply is not None, "planned for ranks"
    return ShardedWeightsProvider(module, supply, torch.device(component.device))


def check_contents(model: object) -> None:
    """Check the headers of all weight files of a model against its components before computing.

    Raises:
        CheckpointError: a tensor of any component is missing, extra or misshapen.
    """
    if not isinstance(model, NativeModelSpec):
        return
    for name in model.components_on_disk:
        check_strictly(model.builder.empty(name), *model.opened_weights(name))


def track_component(module: nn.Module) -> None:
    """Register a loaded module, and each submodule, for `release_components`.

    Submodules count too: one in a reference cycle can outlive the whole module.
    """
    with _LOCK:
        _LOADED.update(module.modules())


@contextmanager
def release_components() -> Iterator[None]:
    """Context: free components that were loaded inside it.

    A module normally goes with its last reference. Only one in a reference cycle needs the garbage
    collector, which takes 0.2 s with torch and diffusers loaded, so it runs only then.
    """
    with _LOCK:
        before = weakref.WeakSet(_LOADED)
    yield
    with _LOCK:
        is_held = any(module not in before for module in _LOADED)
    if is_held:
        gc.collect()
