"""Load a pipeline's components, each in the plan's precision on the plan's device.

diffusers and transformers read the weights themselves, as they know old parameter names, one
component at a time. Missing, misshapen or unexpected tensors in their report are an error, where
the libraries would continue with random values. `everyframe.precision.cast_hooks` casts at module
edges.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from everyframe.checkpoints.config_errors import foreign_errors
from everyframe.checkpoints.folder import listing
from everyframe.checkpoints.read_progress import report_reading
from everyframe.core.errors import CheckpointError, MissingPackageError
from everyframe.core.events import ComponentLoaded, Event
from everyframe.core.plan import FLOAT32, Plan, Settings
from everyframe.diffusers_pipelines.calls.module_calls import encoders, without_weights
from everyframe.diffusers_pipelines.calls.patched_weights import (
    merge_from_files,
    rewrite_from_files,
)
from everyframe.diffusers_pipelines.calls.step_tracking import called_parts
from everyframe.diffusers_pipelines.files.checkpoint import ComponentFolder, PipelineFiles
from everyframe.diffusers_pipelines.files.component_classes import (
    asks_for_code,
    component_class,
    empty_modular,
    pipeline_class,
)
from everyframe.diffusers_pipelines.files.component_tensors import has_own_names, load_from_file
from everyframe.diffusers_pipelines.inputs.signature import CallSignature
from everyframe.fast_paths.apply import apply_fast_paths, swap_modules
from everyframe.fast_paths.registry import BF16_DECODER
from everyframe.precision import cast_hooks
from everyframe.precision.dtypes import torch_dtype
from everyframe.precision.quantization import quantize_layers
from everyframe.runtime.components.component_cache import WarmComponents
from everyframe.runtime.components.component_observers import notify_loaded
from everyframe.runtime.components.meta_init import BUILD_LOCK
from everyframe.runtime.loading import track_component
from everyframe.runtime.memory import offload
from everyframe.runtime.repair import repairs

#: Submodules at which the results of an autoencoder are cast: its `encode` and `decode` are
#: methods, not calls of the module.
_ENDS = ("decoder", "encoder", "quant_conv")


def load(
    plan: Plan,
    files: PipelineFiles,
    found: list[Any],
    warm: WarmComponents,
    *,
    encodes: bool = True,
) -> Iterator[Event]:
    """Append the pipeline to `found`; yields an event per loaded component.

    Its components come from `warm` if they are there; tokenizers and schedulers have state that a
    call changes, and are made again. With `encodes` False another rank encodes, and this rank's
    encoders have no weights.

    Raises:
        CheckpointError: a component has missing, extra or misshapen tensors; names them.
    """
    modules: dict[str, nn.Module] = {}
    for part in files.models:
        began = time.perf_counter()
        if not encodes and encoders((part.name,)):
            dtype = torch_dtype(plan.component(part.name).precision.parameters)
            with torch.inference_mode(False), torch.no_grad():
                modules[part.name] = without_weights(part, dtype)
            continue
        # The engine runs in inference mode; what is made in it can't be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            load_part = partial(_component, files.where, part, plan)
            rewrite = partial(rewrite_from_files, part, plan.component(part.name))
            modules[part.name] = warm.component(part.name, load_part, rewrite, part.patches)
        notify_loaded(part.name, modules[part.name])
        yield ComponentLoaded(part.name, time.perf_counter() - began)
    _place(plan, modules)
    pipe = assembled(files, modules)
    set_tiling(pipe, plan.settings)
    found.append(pipe)


def _component(where: str, part: ComponentFolder, plan: Plan) -> nn.Module:
    planned = plan.component(part.name)
    is_quantized = bool(planned.precision.weight_dtype)
    is_checked = BF16_DECODER in (planned.fast_paths or ())
    read_in = FLOAT32 if is_checked else planned.precision
    if part.tensors is None and not (is_quantized and has_own_names(part)):
        module = _from_folder(where, part, torch_dtype(read_in.parameters))
        quantize_layers(module, planned.precision)
    else:
        with BUILD_LOCK, foreign_errors(f"{where}: its {part.name} can't be made"):
            module = load_from_file(part, read_in)
    # Parameters keep `requires_grad`, as in diffusers: torch picks other kernels without, and their
    # last bits differ. The call runs without gradients anyway.
    module.eval()
    # With its weights already: what is swapped takes them over.
    swap_modules(module, planned.fast_paths)
    track_component(module)
    cast_hooks.add_cast_hooks(
        module, planned.precision, outputs_of(module), keeps_float32=is_checked
    )
    # A pipeline's own code hands half precision to a part in float32, too.
    cast_hooks.add_input_casts(module)
    for repair in planned.repairs:
        repairs.apply_repair(module, repair)
    plain = repairs.plain_parts(planned.repairs)
    apply_fast_paths(module, planned.fast_paths, called_parts(module), plain)
    waits = planned.block_offload or planned.model_offload
    return module if waits else module.to(planned.device)


def _from_folder(where: str, part: ComponentFolder, dtype: torch.dtype) -> nn.Module:
    """Let diffusers or transformers read a component; what they report as amiss is an error."""
    cls = component_class(part)
    how: dict[str, Any] = {"variant": part.variant} if part.variant else {}
    # transformers and diffusers call it by different names; each warns of the other's.
    how["torch_dtype" if _is_of_diffusers(cls) else "dtype"] = dtype
    if asks_for_code(cls):
        how["trust_remote_code"] = part.is_trusted
    module: nn.Module
    message = f"{where}: its {part.name} can't be loaded"
    with BUILD_LOCK, foreign_errors(message), report_reading():
        module, report = cls.from_pretrained(
            str(part.folder),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **how,
        )
    lacking = sorted(map(str, report.get("missing_keys") or ()))
    if lacking:
        raise CheckpointError(
            f"{where}: its {part.name} lacks {len(lacking)} tensors: {listing(lacking)}"
        )
    misshapen = [str(each[0]) for each in report.get("mismatched_keys") or ()]
    if misshapen:
        raise CheckpointError(
            f"{where}: tensors of its {part.name} have another shape than its config says: "
            f"{listing(sorted(misshapen))}"
        )
    # Tables that the module makes itself were once kept with the weights.
    own = {name for name, _ in module.named_buffers()}
    extra = sorted({str(each) for each in report.get("unexpected_keys") or ()} - own)
    if extra:
        raise CheckpointError(
            f"{where}: the files of its {part.name} hold {len(extra)} tensors more than it has: "
            f"{listing(extra)}; they are of another model, or of another version of it"
        )
    merge_from_files(where, part, module)
    return module


def _place(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """Move each component to its device, or set up offload or turns; some have no weights."""
    nowhere = {
        name
        for name, module in modules.items()
        if any(parameter.is_meta for parameter in module.parameters())
    }
    turning = []
    for name, module in modules.items():
        part = plan.component(name)
        if nowhere:  # diffusers asks any part where all are
            wait_elsewhere(module, part.device)
        if name in nowhere:
            continue
        if not part.block_offload and not part.model_offload:
            module.to(part.device)
            continue
        wait_elsewhere(module, part.device)
        if part.block_offload:
            offload.apply(module, part.device)
        else:
            turning.append(module)
    if turning:
        offload.take_turns(turning, plan.device.torch_name)


def wait_elsewhere(module: nn.Module, device: str) -> None:
    """Let diffusers move the module's inputs to `device`, wherever its weights are."""
    vars(module)["_hf_hook"] = _Waiting(torch.device(device))


class _Waiting:
    """Gives the execution device of an offloaded module, under accelerate's attribute name."""

    def __init__(self, device: torch.device) -> None:
        self.execution_device = device


def set_tiling(pipe: Any, settings: Settings) -> None:
    """Enable or disable VAE tiling as the plan has it; for pipelines that Everyframe loaded."""
    vae: Any = getattr(pipe, "vae", None)
    if settings.option("vae_tiling", False):
        vae.enable_tiling()
    elif hasattr(vae, "disable_tiling"):
        vae.disable_tiling()


def set_guidance(pipe: Any, interface: CallSignature, settings: Settings) -> None:
    """Set the guidance scale of a pipeline that has it in a guider component, not in its call."""
    scale, guider = settings.guidance_scale, getattr(pipe, "guider", None)
    if guider is None or interface.name_of("guidance_scale"):
        return
    own = getattr(guider, "config", {}).get("guidance_scale")
    if own is None or own == scale:
        return
    guided = guider.new(guidance_scale=scale)
    if interface.is_modular:
        pipe.update_components(guider=guided)
    else:
        pipe.register_modules(guider=guided)


def _is_of_diffusers(cls: Any) -> bool:
    from diffusers import ModelMixin

    return issubclass(cls, ModelMixin)


def outputs_of(module: nn.Module) -> tuple[str, ...]:
    """Submodules whose results leave the component, for `cast_hooks.add_cast_hooks`."""
    children = dict(module.named_children())
    is_coder = hasattr(module, "decode") and hasattr(module, "encode")
    return tuple(name for name in _ENDS if name in children) if is_coder else ("",)


def assembled(files: PipelineFiles, modules: dict[str, nn.Module]) -> Any:
    """Build the pipeline around its modules; loads tokenizers, schedulers and the like.

    Raises:
        CheckpointError: the components don't fit the pipeline.
        MissingPackageError: a component needs a package that is not installed.
    """
    pipe = empty_modular(files) if files.is_modular else None
    known = set(pipe.component_names) if pipe is not None else None
    loaded: dict[str, Any] = dict(modules)
    for part in files.parts:
        if part.name not in modules and (known is None or part.name in known):
            loaded[part.name] = _small(files.where, part)
    if files.preset is not None and "scheduler" in loaded:
        from everyframe.diffusers_pipelines.files.preset_scheduler import preset_scheduler

        loaded["scheduler"] = preset_scheduler(files.preset, loaded["scheduler"])
    if pipe is not None:
        pipe.update_components(**{k: v for k, v in loaded.items() if k in pipe.component_names})
        return pipe
    cls = pipeline_class(files)
    taken = inspect.signature(cls.__init__).parameters
    own = {name: value for name, value in files.values.items() if name in taken}
    left_out = {name: None for name in files.left_out if name in taken}
    with foreign_errors(f"{files.where}: its {files.class_name} can't be made of its components"):
        try:
            return cls(**left_out, **own, **loaded)
        except ImportError as error:  # of a part that it makes itself where it is saved without one
            text = " ".join(str(error).split())
            raise MissingPackageError(f"{files.class_name} needs a package: {text}") from error


def _small(where: str, part: ComponentFolder) -> Any:
    """Load a component without weights."""
    cls = component_class(part)
    trust = {"trust_remote_code": part.is_trusted} if asks_for_code(cls) else {}
    with foreign_errors(f"{where}: its {part.name} can't be read"):
        try:
            return cls.from_pretrained(str(part.folder), local_files_only=True, **trust)
        except ImportError as error:
            text = " ".join(str(error).split())
            raise MissingPackageError(
                f"the {part.name} of {where} needs a package: {text}"
            ) from error
