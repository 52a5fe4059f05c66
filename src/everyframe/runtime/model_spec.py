"""Model specs, module builders and family objects of the families with stages of their own.

Such a family defines where its files are (`checkpoint.py`), how each component is built
(`components.py`) and how checkpoint keys map to the module's (key maps); the rest is here. Torch is
imported only when a component is built. `everyframe.diffusers_pipelines` has specs of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from everyframe.checkpoints.cache_file import CacheFile
from everyframe.core.errors import CorruptRunError
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Settings
from everyframe.dry_run.call import DryRunCall
from everyframe.precision.islands import outside_of
from everyframe.precision.policy import ComponentNeeds
from everyframe.runtime.components.component_files import CheckpointFiles
from everyframe.runtime.components.element_counts import parse_counts
from everyframe.runtime.components.patchable import (
    NO_PATCHES,
    NOTHING_REPLACED,
    ReplacedComponents,
    WeightPatches,
    WeightTable,
    table_of_module,
)
from everyframe.runtime.interface import Component, MemorySaving
from everyframe.runtime.lossy_sampling import LossySampling
from everyframe.runtime.previews.latent_space import LatentSpace

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.checkpoints.tensor_file import TensorFile
    from everyframe.parallel.communicator import ParallelContext
    from everyframe.runtime.components.component_cache import WarmComponents


_Config = TypeVar("_Config")

#: Component of LoRA files that name none.
DENOISERS = ("denoiser", "unet")


@dataclass(frozen=True)
class ModuleBuilder(ABC, Generic[_Config]):
    """Base class that builds a model's components from its configs."""

    config: _Config

    @property
    @abstractmethod
    def component_names(self) -> tuple[str, ...]:
        """Names of the components."""

    def build(self, component: str) -> nn.Module:
        """Build one component without weights, on torch's current default device."""
        module: nn.Module = getattr(self, component)()
        return module

    @abstractmethod
    def outputs(self, component: str) -> tuple[str, ...]:
        """Submodules whose results the engine receives, in float32 or wider."""

    @abstractmethod
    def needs(self) -> Sequence[tuple[ComponentNeeds, str, str]]:
        """Requirements, title and stage of each component, in the order of their stages."""

    def need(self, component: str, islands: tuple[str, ...] = (), **more: Any) -> ComponentNeeds:
        """Requirements of a component; `more` are further fields of `ComponentNeeds`."""
        return ComponentNeeds(
            component, sum(self.num_elements[component].values()), islands, **more
        )

    def need_of_decoder(self, component: str, **more: Any) -> ComponentNeeds:
        """Requirements of an autoencoder that a `DecodeStage` decodes with; see `need`."""
        islands = outside_of("decoder", self.num_elements[component])
        return self.need(component, prefers="float32", decoder_islands=islands, **more)

    @cached_property
    def num_elements(self) -> Mapping[str, Mapping[str, int]]:
        """Elements of each tensor of each component.

        Counted once and saved in the cache folder, because building is slow. Each later build is
        checked against the saved counts.
        """
        file = self._count
        saved = parse_counts(file.read(), self.component_names)
        if saved is not None:
            return saved
        from everyframe.runtime.components.meta_init import count_elements

        found = {name: count_elements(self.empty(name)) for name in self.component_names}
        file.write(found)
        return found

    @property
    def _count(self) -> CacheFile:
        return CacheFile("sizes", f"{type(self).__module__}: {self!r}")

    @cached_property
    def _made(self) -> dict[str, nn.Module]:
        return {}

    @cached_property
    def _dry_run_components(self) -> set[str]:
        return set()

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, which can't cast modules of this one in inference mode."""
        return {k: v for k, v in vars(self).items() if k not in ("_made", "_dry_run_components")}

    def empty(self, component: str) -> nn.Module:
        """One component on meta. Every call returns the same module; do not change it."""
        if component not in self._made:
            self._made[component] = self._built(component)
        return self._made[component]

    def take(self, component: str) -> nn.Module:
        """One component on meta that the caller owns and may fill and change.

        It reuses the module of `empty` unless a dry run had it, and builds another one then:
        building takes longer than everything else in a plan.
        """
        made = self._made.pop(component, None)  # before the question: a dry run may begin now
        if made is None or component in self._dry_run_components:
            return self._built(component)
        return made

    def _built(self, component: str) -> nn.Module:
        from everyframe.runtime.components.meta_init import build_on_meta, count_elements

        module = build_on_meta(partial(self.build, component))
        counted: Mapping[str, Mapping[str, int]] = vars(self).get("num_elements", {})
        if counted and counted[component] != count_elements(module):
            file = self._count
            file.remove()
            raise CorruptRunError(
                f"{file.path} held other sizes than those of this model's {component}, so its plan "
                "is wrong; the file is removed now, do it again"
            )
        return module

    def _for_dry_runs(self, components: tuple[str, ...]) -> dict[str, nn.Module]:
        """Components that a dry run may cast and swap layers of; they never get weights."""
        self._dry_run_components.update(components)
        return {name: self.empty(name) for name in components}

    def _outputs(self, component: str, module: nn.Module) -> tuple[str, ...]:
        return self.outputs(component)

    def dry_run_call(
        self,
        stage: str,
        component: str,
        call: Callable[[Mapping[str, Any], str], object],
        num_calls: float,
        *key: Hashable,
        components: tuple[str, ...] = (),
    ) -> DryRunCall:
        """The dry-run call of a component, which its stage makes `num_calls` times per video.

        `key` is what it depends on besides the components' sizes. `components` are all of the
        call, if there are several. See `DryRunCall`.
        """
        components = components or (component,)
        return DryRunCall(
            stage,
            component,
            components,
            partial(self._for_dry_runs, components),
            call,
            num_calls,
            (repr(self), stage, components, *key),
            self._outputs,
            denoises=stage == "denoise",
        )


_Options = TypeVar("_Options", bound=FamilyOptions)
_Files = TypeVar("_Files", bound=CheckpointFiles)
_Spec = TypeVar("_Spec", bound="NativeModelSpec")  # type: ignore[type-arg]


@dataclass(frozen=True)
class NativeModelSpec(LossySampling, ABC, Generic[_Options, _Files, _Config]):
    """One checkpoint of a family with its own stages: configs read, weights not.

    `lead_rank_components`, `sequence_backends`, `is_collective` and `has_independent_branches` are
    those of `ShardableSpec`.
    """

    name: str
    title: str
    options: _Options
    files: _Files
    builder: ModuleBuilder[_Config]
    patched: WeightPatches = field(default=NO_PATCHES, kw_only=True, compare=False, repr=False)
    replaced: ReplacedComponents = field(
        default=NOTHING_REPLACED, kw_only=True, compare=False, repr=False
    )
    warm: WarmComponents | None = field(default=None, kw_only=True, compare=False, repr=False)

    lead_rank_components: ClassVar[tuple[str, ...]]
    sequence_backends: ClassVar[tuple[str, ...]] = ("",)
    is_collective: ClassVar[bool] = True
    has_independent_branches: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def read(cls: type[_Spec], name: str, title: str, files: _Files, options: _Options) -> _Spec:
        """Read the configs of a checkpoint.

        Raises:
            CheckpointError: unknown sizes, or components of different models.
        """

    @abstractmethod
    def weights(self, component: str) -> tuple[Path | TensorFile, KeyMap]:
        """Location of a component's weights, and the key map from their names to the module's."""

    @abstractmethod
    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Memory savings for a component; see `DryRunSpec.savings`."""

    def stage_call(
        self,
        settings: Settings,
        stage: str,
        component: str,
        class_name: str,
        num_calls: float,
        *key: Hashable,
        parallel: ParallelContext | None = None,
        components: tuple[str, ...] = (),
    ) -> DryRunCall:
        """The dry-run call of a stage; see `ModuleBuilder.dry_run_call`.

        `class_name` is that of the stage, with the family's module that has it. `parallel` is
        that of one of several ranks.
        """
        call = partial(self._dry_run, class_name, settings, parallel)
        return self.builder.dry_run_call(
            stage, component, call, num_calls, *key, components=components
        )

    def _dry_run(
        self,
        class_name: str,
        settings: Settings,
        parallel: ParallelContext | None,
        modules: Mapping[str, Any],
        device: str,
    ) -> object:
        from everyframe.parallel.communicator import ONE

        # Imported by name: stages import this module, and torch.
        package, _, _ = type(self).__module__.rpartition(".")
        module, _, name = class_name.rpartition(".")
        stages = import_module(f"{package}.{module}")
        context = stages.Context(self, settings, parallel or ONE)
        return getattr(stages, name)(context).dry_run(modules, device)

    @abstractmethod
    def dry_run_calls(
        self, settings: Settings, parallel: ParallelContext | None = None
    ) -> tuple[DryRunCall, ...]:
        """One dry-run call for every stage; with `parallel`, as one of its ranks makes it."""

    @property
    def config(self) -> _Config:
        """Configs of the components."""
        return self.builder.config

    @property
    def components_on_disk(self) -> tuple[str, ...]:
        """The components, in the order in which their files enter the model's digest."""
        return self.builder.component_names

    component_names = components_on_disk

    def components(self, settings: Settings) -> tuple[Component, ...]:
        """The components that run, in the order of their stages."""
        count, sources = self.builder.num_elements, self.files.sources
        files = {name: each.source.name for name, each in self.replaced.tensors.items()}
        return tuple(
            Component(each.name, title, stage, files.get(each.name) or sources[each.name].where,
                      count[each.name], each)
            for each, title, stage in self.builder.needs()
        )  # fmt: skip

    def missing(self) -> tuple[str, ...]:
        """Files to download first, one line each."""
        return self.files.missing()

    def fetch(self: _Spec) -> _Spec:
        """The same model with all of its files on this disk, downloaded if missing."""
        if not self.missing():
            return self
        whole = self.read(self.name, self.title, self.files.fetch(), self.options)
        return replace(whole, patched=self.patched, replaced=self.replaced)

    def weight_tables(self) -> Mapping[str, WeightTable]:
        """Parameters of each component."""
        return {
            name: WeightTable(
                type(module := self.builder.empty(name)).__name__,
                {key: tuple(each.shape) for key, each in module.named_parameters()},
                name in DENOISERS,
            )
            for name in self.components_on_disk
        }

    def with_patches(self: _Spec, patched: WeightPatches) -> _Spec:
        """The same model, which loads with these patches."""
        return replace(self, patched=patched)

    def identity(self) -> Hashable:
        """Classes and configs of the components."""
        return type(self).__module__, repr(self.builder)

    def component_table(self, component: str) -> WeightTable:
        return table_of_module(self.builder.empty(component))

    def component_keys(self, component: str) -> Callable[[str], str | None]:
        return self.weights(component)[1].target

    def with_components(self: _Spec, replaced: ReplacedComponents) -> _Spec:
        """The same model, which loads these components from these files."""
        return replace(self, replaced=replaced)

    def opened_weights(self, component: str) -> tuple[TensorFile, KeyMap]:
        """`weights`, opened; of a replaced component its own file."""
        from everyframe.checkpoints.scaled_file import with_scales
        from everyframe.checkpoints.tensor_file import open_checkpoint

        weights, keys = self.weights(component)
        if component in self.replaced.tensors:
            return self.replaced.tensors[component], replace(keys, rename=(), ignore=())
        return with_scales(open_checkpoint(weights))[0], keys

    def patched_weights(self, component: str) -> tuple[TensorFile, KeyMap]:
        """`opened_weights` with the patches of LoRAs."""
        from everyframe.checkpoints.patched_file import with_patches

        opened, keys = self.opened_weights(component)
        return with_patches(opened, keys, self.patched.patches.get(component, {})), keys

    @property
    @abstractmethod
    def latent_space(self) -> LatentSpace:
        """The latents of its sampler, for previews."""

    def weight_files(self) -> tuple[str, ...]:
        """All weight files, without duplicates."""
        found: dict[str, None] = {}
        for name in self.components_on_disk:
            found |= dict.fromkeys(map(str, self.opened_weights(name)[0].files))
        return tuple(found)
