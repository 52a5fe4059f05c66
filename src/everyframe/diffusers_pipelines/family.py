"""Family of diffusers pipelines: any diffusers video pipeline, run through its own `__call__`.

Unlike Everyframe's own families, all components are loaded together and decoding has no events;
the plan reports both.
Read next: `checkpoint.py` (files), `signature.py` (parameters of a call), `settings.py` (request to
settings), `stage.py` (the run), `loaded_pipeline.py` (a pipeline in memory).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from everyframe.checkpoints.digest import file_states
from everyframe.checkpoints.locate import Location
from everyframe.core.errors import CheckpointError, InputError
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan, Settings
from everyframe.core.request import Request
from everyframe.diffusers_pipelines.files.checkpoint import (
    PipelineFiles,
    find_files,
)
from everyframe.diffusers_pipelines.files.component_classes import (
    component_class,
    empty_modular,
    interface_of,
    is_module,
    pipeline_class,
)
from everyframe.diffusers_pipelines.files.components import ComponentWeights, components, held
from everyframe.diffusers_pipelines.inputs import settings as request_settings
from everyframe.diffusers_pipelines.inputs.defaults import PipelineDefaults, denoisers
from everyframe.diffusers_pipelines.inputs.options import PipelineOptions
from everyframe.diffusers_pipelines.inputs.schedule import has_schedule
from everyframe.diffusers_pipelines.library_patches import quiet_libraries
from everyframe.diffusers_pipelines.loaded_pipeline import CompleteSpec, LoadedPipelineSpec
from everyframe.diffusers_pipelines.oom_fallback import chunk_savings
from everyframe.diffusers_pipelines.parallel.token_splits import CUTS, TransformerSplit, rank_share
from everyframe.dry_run.call import DryRunCall
from everyframe.parallel.head_partition import SEQUENCE_BACKENDS
from everyframe.runtime.components.patchable import (
    NO_PATCHES,
    NOTHING_REPLACED,
    ReplacedComponents,
    WeightPatches,
    WeightTable,
)
from everyframe.runtime.interface import (
    Component,
    MemorySaving,
    ModelSpec,
    RankShare,
    Stage,
    VideoGroup,
)
from everyframe.runtime.previews.latent_space import LatentSpace

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.diffusers_pipelines.dry_run import PipelineDryRun
    from everyframe.parallel.communicator import ParallelContext
    from everyframe.runtime.components.component_cache import WarmComponents
    from everyframe.runtime.sampling_preset import SamplingPreset
    from everyframe.runtime.saved_checkpoint import ChangedFile


@dataclass(frozen=True)
class PipelineSpec(CompleteSpec):
    """A diffusers pipeline checkpoint: its configs are read, its weights are not."""

    name: str
    title: str
    options: PipelineOptions
    files: PipelineFiles
    sizes: PipelineDefaults
    patched: WeightPatches = field(default=NO_PATCHES, compare=False, repr=False)
    replaced: ReplacedComponents = field(default=NOTHING_REPLACED, compare=False, repr=False)
    warm: WarmComponents | None = field(default=None, compare=False, repr=False)

    def identity(self) -> Hashable:
        """All files of its folder as they are now: configs decide what is built."""
        return self.name, file_states(self.files.folder.rglob("*"))

    @property
    def component_names(self) -> tuple[str, ...]:
        """The components with weights, here or in a file that was given."""
        return tuple(part.name for part in self.files.parts if is_module(part))

    def component_table(self, component: str) -> WeightTable:
        """Parameters and persistent buffers of a component's module."""
        from everyframe.diffusers_pipelines.files.component_tensors import module_table

        return module_table(next(p for p in self.files.parts if p.name == component))

    def component_keys(self, component: str) -> Callable[[str], str | None]:
        """The names themselves: diffusers' files have those of its modules."""
        return lambda name: name

    def with_components(self, replaced: ReplacedComponents) -> PipelineSpec:
        """The same pipeline, which loads these components from these files."""
        tensors = replaced.tensors
        parts = tuple(
            replace(part, tensors=tensors[part.name], weights=tensors[part.name].files)
            if part.name in tensors
            else part
            for part in self.files.parts
        )
        return replace(self, files=replace(self.files, parts=parts), replaced=replaced)

    def saved_from(self) -> Path:
        """The pipeline's folder."""
        return self.files.folder

    def changed_files(self, quantize: str) -> Sequence[ChangedFile]:
        """The weights with LoRAs or from files of their own; see `SavableSpec`."""
        from everyframe.diffusers_pipelines.files.saved_files import changed_files

        return changed_files(self.files, quantize)

    @property
    def denoiser_classes(self) -> tuple[str, ...]:
        """Class of each denoiser."""
        classes = {part.name: part.class_name for part in self.files.models}
        return tuple(classes[name] for name in denoisers(classes))

    @property
    def _scheduler_class(self) -> str:
        return "None" if self.files.scheduler is None else self.files.scheduler.class_name

    @property
    def _scheduler_config(self) -> Mapping[str, Any]:
        return {} if self.files.scheduler is None else self.files.scheduler.scheduler_config()

    def with_preset(self, preset: SamplingPreset, file: str) -> PipelineSpec:
        """The same pipeline with the preset's defaults, and its sampler unless one is given."""
        is_own = preset.has_schedule and not has_schedule(self.options.option)
        sizes = replace(self.sizes, preset=preset, preset_of=file)
        files = replace(self.files, preset=preset if is_own else None)
        return replace(self, sizes=sizes, files=files)

    def weight_tables(self) -> Mapping[str, WeightTable]:
        """Parameters of each component by its files' headers."""
        from everyframe.diffusers_pipelines.calls.patched_weights import tables_of_files

        return tables_of_files(self.files)

    def with_patches(self, patched: WeightPatches) -> PipelineSpec:
        """The same pipeline, which loads with these patches."""
        parts = tuple(
            replace(part, patches=patched.patches.get(part.name, {})) for part in self.files.parts
        )
        return replace(self, files=replace(self.files, parts=parts), patched=patched)

    def resolve(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Resolve the request to settings, and notes for the user.

        Raises:
            InputError: an option has no effect on this pipeline, or a value is not allowed.
        """
        if self.options.vae_tiling and not self._can_tile():
            raise InputError(f"vae_tiling has no effect on {self.title}: its autoencoder has none")
        return request_settings.resolve_settings(
            self.sizes, self.title, request, self.options, seed
        )

    def _can_tile(self) -> bool:
        vae = next((part for part in self.files.models if part.name == "vae"), None)
        return vae is not None and hasattr(component_class(vae), "enable_tiling")

    def components(self, settings: Settings) -> tuple[Component, ...]:
        return components(self._held, self.sizes, settings)

    @cached_property
    def _held(self) -> tuple[ComponentWeights, ...]:
        # Once: a plan asks for the components many times.
        return held(self.files)

    @cached_property
    def _dry(self) -> PipelineDryRun:
        from everyframe.diffusers_pipelines.dry_run import PipelineDryRun

        interface = self.sizes.interface
        return PipelineDryRun(
            self.files, interface, request_settings.check_options(interface, self.options.option)
        )

    def dry_run_calls(
        self, settings: Settings, parallel: ParallelContext | None = None
    ) -> tuple[DryRunCall, ...]:
        """One joint dry-run call, as a rank of `parallel` makes it, with an entry per component."""
        return self._dry.dry_run_calls(settings, parallel)

    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Memory fallbacks: decode fewer frames at once, then VAE tiling, each where supported."""
        vae = next((part for part in self.files.models if part.name == "vae"), None)
        if component != "vae" or vae is None:
            return
        given = self.options.option
        for saving in chunk_savings(self.sizes.interface, given, settings, vae.class_name):
            settings = saving.settings
            yield saving
        if not settings.option("vae_tiling", False) and self._can_tile():
            yield MemorySaving(
                settings.with_option("vae_tiling", True),
                "decoded in tiles (vae_tiling), which changes the picture near their seams; memory "
                "and time of that are forecast roughly",
                is_lossy=True,
            )

    def weight_files(self) -> tuple[str, ...]:
        return tuple(str(file) for part in self.files.models for file in part.weights)

    @property
    def latent_space(self) -> LatentSpace | None:
        """The latents of its component ``vae``, if it has one."""
        from everyframe.diffusers_pipelines.calls.step_previews import latent_space

        vae = next((part for part in self.files.models if part.name == "vae"), None)
        if vae is None:
            return None
        return latent_space(self.sizes, vae.class_name, files=tuple(map(str, vae.weights)))

    def stage(self, plan: Plan, parallel: ParallelContext) -> Stage:
        """The only stage: load the components and make the call."""
        from everyframe.diffusers_pipelines.stage import PipelineStage
        from everyframe.runtime.components.component_cache import WarmComponents

        interface = self.sizes.interface
        own = request_settings.check_options(interface, self.options.option)
        return PipelineStage(
            plan,
            interface,
            own,
            files=self.files,
            savings=self.savings,
            parallel=parallel,
            latents=self.latent_space,
            branches=self._dry.branches(plan.settings) if parallel.num_cfg_groups > 1 else None,
            warm=self.warm or WarmComponents(),
        )


@dataclass(frozen=True)
class ShardablePipelineSpec(PipelineSpec):
    """A pipeline whose videos several ranks can share: by guidance branches, tokens, or both."""

    is_collective = False
    has_independent_branches = True

    @property
    def lead_rank_components(self) -> tuple[str, ...]:
        """Encoders that run on the first rank, which broadcasts their results."""
        from everyframe.diffusers_pipelines.calls.module_calls import encoders

        return encoders(part.name for part in self.files.models)

    @property
    def sequence_backends(self) -> tuple[str, ...]:
        """Sequence-parallel backends; empty if the denoisers' token split is not known."""
        return () if self._cuts is None else SEQUENCE_BACKENDS

    @cached_property
    def _cuts(self) -> TransformerSplit | None:
        classes = {part.name: part for part in self.files.models}
        found = [classes[name] for name in denoisers(classes)]
        is_known = all(
            part.library == "diffusers"
            and part.class_name in CUTS
            and CUTS[part.class_name].fits(part.config())
            for part in found
        )
        return CUTS[found[0].class_name] if found and is_known else None

    def num_branches(self, settings: Settings) -> int:
        """Guidance branches that ranks can compute separately, found by a dry run of the call."""
        return self._dry.branches(settings).count

    def why_one_branch(self, settings: Settings) -> str:
        return self._dry.branches(settings).why

    def rank_part(
        self, settings: Settings, video_group: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """A rank's share: branches, tokens and heads (or their substitute), and bytes sent."""
        cuts, branches = self._cuts, self._dry.branches(settings)

        def cutting(video_group: VideoGroup, rank: int, batch: int) -> RankShare:
            assert cuts is not None
            return cuts.part(self.sizes, settings, video_group, rank, element_bytes, batch)

        return rank_share(branches, cutting if cuts else None, video_group, rank, self.title)


def _can_be_shared(files: PipelineFiles) -> bool:
    """Whether the call is diffusers' own and the denoisers have known names."""
    is_plain = not files.is_modular and files.code_file is None
    return is_plain and bool(denoisers([part.name for part in files.models]))


class DiffusersPipelineFamily:
    """Family object of the registry, asked last: other families know their own pipelines better."""

    name = "pipeline"
    title = "diffusers video pipelines"
    options: type[FamilyOptions] = PipelineOptions

    def recognise(self, location: Location, options: FamilyOptions) -> PipelineSpec | None:
        """The video pipeline at that location, by its index, configs and class, or None."""
        assert isinstance(options, PipelineOptions)
        files = find_files(
            location, trust_remote_code=options.trust_remote_code, variant=options.variant
        )
        if files is None:
            return None
        with quiet_libraries():
            empty = empty_modular(files) if files.is_modular else None
            interface = interface_of(files, empty)
            _check_whole(files, location.components)
        sizes = PipelineDefaults(interface, _configs(files, empty))
        made = ShardablePipelineSpec if _can_be_shared(files) else PipelineSpec
        return made(location.name, location.title(files.class_name), options, files, sizes)

    def stages(
        self, spec: ModelSpec, plan: Plan, clip: int, parallel: ParallelContext
    ) -> Sequence[Stage]:
        """One stage: the call, after loading if the pipeline is not in memory."""
        assert isinstance(spec, PipelineSpec | LoadedPipelineSpec)
        assert clip == 0, "a chain is refused when the request is resolved"
        return (spec.stage(plan, parallel),)


def _configs(files: PipelineFiles, empty: Any) -> Mapping[str, Mapping[str, Any]]:
    read = {part.name: part.config() for part in files.parts}
    if empty is not None:
        # Guiders of modular pipelines are made from configs in their code.
        for name, made in empty.components.items():
            config = getattr(made, "config", None)
            if name not in read and isinstance(config, Mapping):
                read[name] = dict(config)
    return {name: config for name, config in read.items() if config}


def _check_whole(files: PipelineFiles, replaced: Collection[str]) -> None:
    """Raise `CheckpointError` for a required component that is missing or has no weights.

    Those that are replaced by other files need none.
    """
    for part in files.parts:
        if is_module(part) and not part.weights and part.name not in replaced:
            raise CheckpointError(
                f"{files.where} lacks the weights of its {part.name}: no .safetensors file in "
                f"{part.folder.name}/; get the whole checkpoint"
            )
    if files.is_modular:
        return
    cls = pipeline_class(files)
    required, optional = cls._get_signature_keys(cls)
    there = {part.name for part in files.parts}
    left_out = set(getattr(cls, "_optional_components", ())) | set(optional)
    lacking = sorted(set(required) - {"self"} - there - left_out)
    if lacking:
        raise CheckpointError(
            f"{files.where} lacks what a {files.class_name} can't do without: {', '.join(lacking)}"
        )


PIPELINE = DiffusersPipelineFamily()
