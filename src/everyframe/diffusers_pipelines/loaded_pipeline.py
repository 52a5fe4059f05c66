"""Spec of a pipeline in memory: run as its owner loaded it, and left unchanged.

Dtypes, device and weights belong to the caller and are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from everyframe.core.bytes import format_bytes
from everyframe.core.errors import InputError
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan, Precision, Settings, Switches
from everyframe.core.quality import CACHES, PREDICTORS
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.calls.call_thread import (
    Calling,
    Emit,
    run_beside_others,
    run_here,
)
from everyframe.diffusers_pipelines.calls.digests import digest_component, digest_pipeline
from everyframe.diffusers_pipelines.calls.step_caches import cache_notes
from everyframe.diffusers_pipelines.files.component_classes import checked
from everyframe.diffusers_pipelines.files.components import STAGE, prefers, working_bytes
from everyframe.diffusers_pipelines.inputs import call_options, media
from everyframe.diffusers_pipelines.inputs import settings as request_settings
from everyframe.diffusers_pipelines.inputs.defaults import UNETS, PipelineDefaults, denoisers
from everyframe.diffusers_pipelines.inputs.image_forms import form_of
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.diffusers_pipelines.inputs.signature import (
    NAMES,
    OWN_SEED,
    CallSignature,
    of_pipeline,
)
from everyframe.diffusers_pipelines.lossy.euler_correction import EULER_METHODS, why_no_euler
from everyframe.diffusers_pipelines.oom_fallback import chunk_savings
from everyframe.hardware.thread_state import ThreadState
from everyframe.precision.dtypes import NUM_BYTES, dtype_name
from everyframe.precision.policy import ComponentNeeds
from everyframe.precision.strict_float32 import switches_of
from everyframe.runtime.components.patchable import NO_PATCHES, WeightPatches, WeightTable
from everyframe.runtime.interface import Component, MemorySaving, Stage
from everyframe.runtime.previews.latent_space import LatentSpace

if TYPE_CHECKING:
    from everyframe.parallel.communicator import ParallelContext


_Spec = TypeVar("_Spec", bound="CompleteSpec")

#: Schedulers of consistency and trajectory distillation.
_OF_DISTILLED = ("LCMScheduler", "FlowMatchLCMScheduler", "SCMScheduler", "TCDScheduler")


class CompleteSpec:
    """Base of pipeline specs, which lack no file: a hub id is downloaded before it is known."""

    sizes: PipelineDefaults

    @property
    def is_distilled(self) -> bool:
        """Whether its scheduler is one of models that were distilled to few steps."""
        return self._scheduler_class in _OF_DISTILLED

    @property
    def _scheduler_class(self) -> str:
        """Class of the scheduler that its checkpoint or its owner gave it."""
        raise NotImplementedError

    @property
    def _scheduler_config(self) -> Mapping[str, Any]:
        """That scheduler's config."""
        raise NotImplementedError

    @property
    def denoiser_classes(self) -> tuple[str, ...]:
        """Class of each denoiser."""
        raise NotImplementedError

    @property
    def has_partial_guidance(self) -> bool:
        """See `LossySpec`: its guidance is in its own call."""
        return False

    @property
    def has_held_guidance(self) -> bool:
        """See `LossySpec`: its guidance is in its own call."""
        return False

    def sampling_methods(self, settings: Settings) -> tuple[str, ...]:
        """See `LossySpec`: its own scheduler does the steps, so no solver replaces it.

        `abm2` reaches plain Euler steps through the answers.
        """
        names = denoisers(self.sizes.configs)
        is_unet = len(names) == 1 and self.sizes.denoiser.get("_class_name") in UNETS
        eulers = () if self._why_no_euler else EULER_METHODS
        return (*eulers, *PREDICTORS, *(CACHES if is_unet else ()))

    def why_not(self, method: str) -> str | None:
        """See `LossySpec`."""
        return self._why_no_euler if method in EULER_METHODS else None

    @property
    def _why_no_euler(self) -> str | None:
        return why_no_euler(self._scheduler_class, self._scheduler_config, self.denoiser_classes)

    def missing(self) -> tuple[str, ...]:
        return ()

    def fetch(self: _Spec) -> _Spec:
        return self

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        return request_settings.smaller_settings(self.sizes, settings)


@dataclass(frozen=True, eq=False)
class LoadedPipelineSpec(CompleteSpec):
    """A loaded pipeline and the options that came with it, including generators."""

    pipe: Any
    sizes: PipelineDefaults
    options: PipelineOptions
    #: Torch state of the caller's thread; the call runs with it.
    thread: ThreadState = field(default_factory=ThreadState.here)
    #: Callback for events as they occur; if set, the call runs in the caller's thread.
    on_event: Emit | None = None
    patched: WeightPatches = NO_PATCHES

    def weight_tables(self) -> Mapping[str, WeightTable]:
        """Parameters of each component."""
        from everyframe.diffusers_pipelines.calls.patched_weights import tables_of_modules

        return tables_of_modules(self.pipe.components)

    def with_patches(self, patched: WeightPatches) -> LoadedPipelineSpec:
        """The same pipeline, whose weights are patched while it runs."""
        return replace(self, patched=patched)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the weights that LoRAs change, which are put back after the call."""
        from everyframe.diffusers_pipelines.calls.patched_weights import patched_bytes

        return patched_bytes(self.pipe.components, self.patched.patches)

    @cached_property
    def switches(self) -> Switches:
        """Torch's switches during the call: those of the caller's thread."""
        return switches_of(self.thread)

    def asked(self, request: Request) -> Request:
        """The request with the pipeline's device, and seeds in place of generators.

        Raises:
            InputError: several devices, or a seed beside a generator.
        """
        if request.num_ranks > 1:
            raise InputError(
                "a pipeline in memory works where it is, on one device; for several devices save "
                'it (pipe.save_pretrained("folder")) and give the folder to '
                f'everyframe.generate(model="folder", num_devices={request.num_ranks})'
            )
        request = Request(**{**request.given(), "device": self.device})
        has_seed = OWN_SEED in self.sizes.interface.parameters
        # As the request has it: `self.options` has its shared options there too (`source`).
        option = request.family_options.get("option")
        given = option if isinstance(option, Mapping) else {}
        return call_options.with_generator_seeds(request, given, has_seed=has_seed)

    @property
    def name(self) -> str:
        """Its class; the origin of a loaded pipeline is not known."""
        return self.sizes.interface.class_name

    @property
    def title(self) -> str:
        return f"{self.name} given in Python"

    @property
    def _scheduler_class(self) -> str:
        return type(getattr(self.pipe, "scheduler", None)).__name__

    @property
    def _scheduler_config(self) -> Mapping[str, Any]:
        return self.sizes.configs.get("scheduler", {})

    @property
    def denoiser_classes(self) -> tuple[str, ...]:
        """Class of each denoiser, also of one that was compiled by its owner."""
        parts = [self.pipe.components[name] for name in denoisers(self.sizes.configs)]
        return tuple(type(getattr(part, "_orig_mod", part)).__name__ for part in parts)

    @property
    def device(self) -> str:
        """Its execution device, by torch's name."""
        return str(getattr(self.pipe, "_execution_device", None) or self.pipe.device)

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Resolve the request to settings, and notes for the user.

        Raises:
            InputError: an option would change the loaded pipeline: model, dtype, memory, tiling.
        """
        for name in ("model", "dtype", "max_memory", "max_host_memory"):
            if getattr(request, name) not in (None, "auto"):
                raise InputError(f"{name} can't be chosen for a pipeline that is loaded already")
        if self.options.vae_tiling:
            raise InputError(
                "vae_tiling would change a pipeline that is yours; call pipe.vae.enable_tiling()"
            )
        settings, notes = request_settings.resolve_settings(
            self.sizes, self.title, request, self.options, seed, is_given=True
        )
        if isinstance(request.latents, torch.Tensor):  # in the dtype that they have
            forms = (*settings.given_forms, ("latents", form_of(request.latents)))
            settings = replace(settings, given_forms=forms)
        if self.saved_bytes:
            size = format_bytes(self.saved_bytes)
            saved = f"LoRAs change {size} of weights, which are saved in host memory for the call"
            notes = (*notes, saved)
        notes = (*notes, *cache_notes(self.pipe.components))
        return settings, (*notes, *call_options.notes(self.options.option))

    def components(self, settings: Settings) -> tuple[Component, ...]:
        made = []
        for name, module in self.pipe.components.items():
            if isinstance(module, nn.Module):
                made.append(_component(name, module, self.sizes, settings))
        return tuple(made)

    def weight_files(self) -> tuple[str, ...]:
        """Empty: weights in memory may be merged or changed, so no file stands for them."""
        return ()

    def digests(self) -> dict[str, str]:
        """Digests by component, compared when a run is resumed."""
        return digest_pipeline(self.pipe)

    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Memory fallback: decode fewer frames at once, if the call has a parameter for it.

        It is an argument of the call, so the pipeline itself is not changed.
        """
        if component == "vae":
            vae = type(self.pipe.components[component]).__name__
            yield from chunk_savings(self.sizes.interface, self.options.option, settings, vae)

    @property
    def latent_space(self) -> LatentSpace | None:
        """The latents of its component ``vae``, if it has one."""
        from everyframe.diffusers_pipelines.calls.step_previews import latent_space

        vae = self.pipe.components.get("vae")
        digest = partial(digest_component, vae)
        return latent_space(self.sizes, type(vae).__name__, own_digest=digest)

    def stage(self, plan: Plan, parallel: ParallelContext) -> Stage:
        """The only stage: the call, on one device."""
        from everyframe.diffusers_pipelines.stage import PipelineStage

        interface = self.sizes.interface
        own = request_settings.check_options(interface, self.options.option, is_given=True)
        own = call_options.call_values(own)
        calling: Calling = partial(run_beside_others, within=self.thread.entered)
        if self.on_event is not None:
            calling = partial(run_here, on_event=self.on_event)
        assert parallel.world.size == 1, "a pipeline in memory is on one device"
        return PipelineStage(
            plan,
            interface,
            own,
            pipe=self.pipe,
            savings=self.savings,
            calling=calling,
            latents=self.latent_space,
            patches=self.patched.patches,
        )


def given_pipeline(
    pipe: Any, options: FamilyOptions, on_event: Emit | None = None
) -> LoadedPipelineSpec:
    """The spec of a loaded pipeline; `on_event` as in `LoadedPipelineSpec`.

    Raises:
        InputError: it is not a diffusers pipeline.
        CheckpointError: it does not make videos.
    """
    assert isinstance(options, PipelineOptions)
    if not callable(pipe) or not isinstance(getattr(pipe, "components", None), Mapping):
        raise InputError(
            f"pipe must be a loaded diffusers pipeline, got {type(pipe).__name__}; "
            "for a folder or a hub id there is generate(model=...)"
        )
    sizes = sizes_of(pipe, checked(of_pipeline(pipe)))
    return LoadedPipelineSpec(pipe, sizes, options, on_event=on_event)


def in_our_words(pipe: Any, request: Request) -> Request:
    """The request with the pipeline's own parameter names replaced by Everyframe's.

    ``frame_rate`` becomes `fps` and ``video_length`` becomes `num_frames`. A condition object
    becomes its fields, as a run folder stores them.

    Raises:
        InputError: both names of one option were given.
    """
    given = request.family_options.get("option")
    if not isinstance(given, Mapping) or not isinstance(getattr(pipe, "components", None), Mapping):
        return request
    interface = of_pipeline(pipe)
    own, moved = media.as_fields(interface, given), {}
    for option in NAMES:
        name = interface.name_of(option)
        if name not in own or name == option or option not in Request.model_fields:
            continue
        if option == "seed":
            continue  # what is given there is a generator
        if getattr(request, option) is not None:
            raise InputError(f"{option} and {name} are the same; give one of them")
        moved[option] = own.pop(name)
    options = {**request.family_options, "option": own}
    return Request(**{**request.given(), "family_options": options, **moved})


def sizes_of(pipe: Any, interface: CallSignature) -> PipelineDefaults:
    """Defaults of a loaded pipeline, from its components' configs."""
    configs = {
        name: dict(config)
        for name, part in pipe.components.items()
        if isinstance(config := getattr(part, "config", None), Mapping)
    }
    return PipelineDefaults(interface, configs)


def _component(
    name: str, module: nn.Module, sizes: PipelineDefaults, settings: Settings
) -> Component:
    parameters = list(module.parameters())
    count = {key: each.numel() for key, each in module.named_parameters()}
    dtypes = [dtype_name(each.dtype) for each in parameters if each.is_floating_point()]
    # Mixed dtypes: the most frequent one stands for the component.
    main = max(dict.fromkeys(dtypes), key=dtypes.count) if dtypes else "float32"
    dtype = main if main in NUM_BYTES else "float32"
    return Component(
        name=name,
        title=name.replace("_", " "),
        stage=STAGE,
        source="given in Python",
        num_elements=count,
        needs=ComponentNeeds(name, sum(count.values()), prefers=prefers(name, "")),
        working_bytes=partial(working_bytes, name, sizes, settings),
        has_precision=Precision(dtype, dtype),
    )
