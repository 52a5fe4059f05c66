"""Dry run of a pipeline's own call: components on meta, real scheduler and tokenizers.

Pipelines are not written for tensors without values, so a call may reach a line that fails. The
plan then reports it and uses rough forecasts. One step per expert is enough, as further steps cost
the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from everyframe.checkpoints.digest import file_states
from everyframe.core.errors import InputError
from everyframe.core.plan import Settings
from everyframe.diffusers_pipelines.call_arguments import arguments
from everyframe.diffusers_pipelines.calls.call import all_blocks, attributes_kept, no_progress_bars
from everyframe.diffusers_pipelines.calls.call_outputs import size_of
from everyframe.diffusers_pipelines.calls.digests import digest_call
from everyframe.diffusers_pipelines.calls.refusals import call_checked
from everyframe.diffusers_pipelines.files.checkpoint import PipelineFiles
from everyframe.diffusers_pipelines.files.component_classes import component_class, empty_component
from everyframe.diffusers_pipelines.files.components import STAGE
from everyframe.diffusers_pipelines.inputs import defaults
from everyframe.diffusers_pipelines.inputs.clip_continuation import OPTION
from everyframe.diffusers_pipelines.inputs.defaults import denoisers
from everyframe.diffusers_pipelines.inputs.image_forms import Form, blank, sides_of
from everyframe.diffusers_pipelines.inputs.schedule import has_schedule
from everyframe.diffusers_pipelines.inputs.signature import CallSignature
from everyframe.diffusers_pipelines.library_patches import quiet_libraries, stand_in_accepted
from everyframe.diffusers_pipelines.loading import assembled, outputs_of, set_guidance, set_tiling
from everyframe.diffusers_pipelines.parallel import cfg_detection, sequence_parallel
from everyframe.diffusers_pipelines.parallel.cfg_detection import CfgBranches
from everyframe.diffusers_pipelines.parallel.cfg_parallel import CfgParallel
from everyframe.dry_run.call import DryRunCall
from everyframe.parallel.communicator import ONE, ParallelContext
from everyframe.runtime.components.meta_init import build_on_meta
from everyframe.runtime.interface import ConditioningFrames, VideoState

#: Calls of PNDM's three Runge-Kutta steps beyond one each.
_RUNGE_KUTTA = 9


@dataclass(frozen=True)
class PipelineDryRun:
    """Runs the calls of one pipeline dry; `own` are the parameters that only this pipeline has."""

    files: PipelineFiles
    interface: CallSignature
    own: Mapping[str, Any]
    _branches: dict[str, CfgBranches] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Its components with weights, on meta; the same objects for every call."""
        with quiet_libraries():
            found = {
                part.name: build_on_meta(partial(empty_component, part))
                for part in self.files.models
            }
        for module in found.values():
            _narrow_tables(module)
        return found

    @cached_property
    def _pipe(self) -> Any:
        with quiet_libraries():
            pipe = assembled(self.files, self.modules)
        if self._schedule[1] == _RUNGE_KUTTA:  # thirteen calls at least are too many to run dry
            pipe.scheduler.register_to_config(skip_prk_steps=True)
        return pipe

    @cached_property
    def _identity(self) -> str:
        configs = {part.name: part.config() for part in self.files.parts}
        return f"{self.files!r} {json.dumps(configs, sort_keys=True, default=str)}"

    @cached_property
    def _given(self) -> str:
        return repr(_content_of(self.own))

    @cached_property
    def _states(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """All of its files as they are now; empty for code that comes along, or given objects."""
        has_code = self.files.code_file or any(part.is_trusted for part in self.files.parts)
        if has_code or not _is_plain(self.own):
            return ()
        others = (weights for part in self.files.parts for weights in part.weights)
        return file_states((*self.files.folder.rglob("*"), *others))

    @property
    def _part_of_steps(self) -> float:
        """Fraction of the steps that run: `strength` for video-to-video pipelines, otherwise 1."""
        declared = self.interface.parameters.get("strength")
        part = self.own.get("strength", declared.default if declared else None)
        return part if isinstance(part, float) and 0 < part < 1 else 1.0

    @property
    def _steps_fewer(self) -> int:
        """Requested steps less computed ones."""
        return defaults.of(defaults.STEPS_FEWER, self.interface.class_name) or 0

    @cached_property
    def _schedule(self) -> tuple[int, int]:
        """Calls of the denoiser in one step of the scheduler, and how many are made beside them."""
        part = self.files.scheduler
        if part is None or self.files.preset is not None:
            return 1, 0
        order = int(getattr(component_class(part), "order", 1))
        # Others carry PNDM's config where they were made from it.
        if part.class_name != "PNDMScheduler":
            return order, 0
        return order, 1 if part.scheduler_config().get("skip_prk_steps") else _RUNGE_KUTTA

    def _num_more(self, num_steps: int, *, is_dry: bool = False) -> float:
        """Calls beyond those of `_num_made`, all computed.

        A second-order scheduler (Heun, KDPM2) calls twice a step, but once in the last; PNDM calls
        four times in each of its first three, or once more in the second without these.
        """
        order, num_beside = self._schedule
        num_beside = min(num_beside, 1) if is_dry else num_beside
        return (order - 1) * (self._num_made(num_steps) - 1) + (num_steps > 1) * num_beside

    def _num_made(self, num_steps: float) -> float:
        """Steps that are computed of so many, as diffusers rounds their share; 1 at least."""
        part = self._part_of_steps
        return max(num_steps - self._steps_fewer if part == 1 else int(num_steps * part), 1)

    def dry_run_calls(
        self, settings: Settings, parallel: ParallelContext | None
    ) -> tuple[DryRunCall, ...]:
        """The pipeline's call, once for each component; `parallel` selects the rank's share."""
        parallel = parallel or ONE
        experts = len(denoisers([part.name for part in self.files.models]))
        few = self._few(settings, experts)
        steps, run_dry = settings.num_inference_steps, few.num_inference_steps
        made = self._num_made(settings.num_denoiser_calls) + self._num_more(steps)
        repeats = made / (self._num_made(run_dry) + self._num_more(run_dry, is_dry=True))
        rank = (
            parallel.video_group.rank,
            parallel.video_group.weights,
            parallel.sequence_backend,
            parallel.num_cfg_groups,
        )
        key = (self._identity, repr(few), self._given, rank)
        return tuple(
            DryRunCall(
                stage=STAGE,
                component=part.name,
                components=tuple(each.name for each in self.files.models),
                modules=partial(getattr, self, "modules"),
                call=partial(self.call, few, parallel),
                num_calls=repeats if denoisers((part.name,)) else 1,
                key=key,
                outputs=_outputs,
                denoises=bool(denoisers((part.name,))),
                is_foreign=True,
                model=self._identity,
                files=self._states,
                before=partial(self._find_branches, few, parallel),
            )
            for part in self.files.models
            # Tiles are thousands of operations each.
            if not (_is_tiled(settings) and part.name == "vae")
        )

    @property
    def _has_fixed_steps(self) -> bool:
        """Whether no number makes its steps fewer, so that all of them are run dry."""
        takes_number = self.interface.name_of("num_inference_steps") is not None
        return self.interface.has_fixed_steps or not takes_number or has_schedule(self.own)

    def _few(self, settings: Settings, least: int) -> Settings:
        """The same settings with as few steps as possible, but at least `least`."""
        own = defaults.of(defaults.FEWEST_STEPS, self.interface.class_name) or 1
        fewest = max(least, own)
        steps = settings.num_inference_steps
        if not self._has_fixed_steps:
            steps = min(ceil(fewest / self._part_of_steps) + self._steps_fewer, steps)
        height, width = settings.conditioned_size
        conditioned = replace(
            settings, num_frames=settings.conditioned_length, nominal_length=None,
            height=height, width=width, nominal_size=None,
        )  # fmt: skip
        return replace(conditioned, num_inference_steps=steps, seed=0, num_videos=1, method=None)

    def branches(self, settings: Settings) -> CfgBranches:
        """The guidance branches of these settings, detected once and cached."""
        # Tiles of the autoencoder come after them.
        few = replace(self._few(settings, 1), savings=()).with_option("vae_tiling", False)
        key = repr(few)
        if key not in self._branches:
            # A schedule may have more steps than what it is asked for.
            guided = few.guidance_scale > 1

            def see(is_guided: bool) -> cfg_detection.ObservedCalls:
                scale = few.guidance_scale if is_guided or not guided else 1.0
                asked = replace(few, guidance_scale=scale)
                return cfg_detection.observe_calls(self.modules, partial(self._call, asked))

            self._branches[key] = cfg_detection.find_cfg_branches(
                see, is_guided=guided, num_steps=few.num_inference_steps
            )
        return self._branches[key]

    def _find_branches(self, settings: Settings, parallel: ParallelContext) -> None:
        """Find the guidance branches that `call` asks for."""
        if parallel.num_cfg_groups > 1:
            self.branches(settings)

    def call(
        self,
        settings: Settings,
        parallel: ParallelContext,
        modules: Mapping[str, nn.Module],
        device: str,
    ) -> tuple[int, int, int] | None:
        """Make the pipeline's call with `modules`, which are its own, as one rank of `parallel`.

        Returns (frames, height, width) of the output; None if nothing is decoded.
        """
        with ExitStack() as stack:
            # Modules keep tables of positions, as the device has them that the stand-in stood for.
            parts = [part for module in modules.values() for part in module.modules()]
            stack.enter_context(attributes_kept(parts))
            for patch in sequence_parallel.apply_to_all(modules, parallel).values():
                stack.callback(patch.remove)
            if parallel.num_cfg_groups > 1:
                denoising = {name: modules[name] for name in denoisers(modules)}
                stack.enter_context(CfgParallel(denoising, self.branches(settings), parallel))
            result = self._call(settings)
        return None if _is_tiled(settings) else size_of(result)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the modules and the pipeline built here."""
        return PipelineDryRun, (self.files, self.interface, self.own)

    def _call(self, settings: Settings) -> object:
        size = settings.conditioned_size
        forms = dict.fromkeys(settings.given_frames, ("picture", *size))
        forms |= {name: form for name, form in settings.given_forms if name in forms}
        try:
            return self._dry_run_call(settings, forms)
        except InputError:
            # What is refused as it is, a run gives as a picture.
            plain = {
                name: form if name == OPTION else ("picture", *(sides_of(form) or size))
                for name, form in forms.items()
            }
            if plain == forms:
                raise
            with suppress(InputError):
                return self._dry_run_call(settings, plain)
            raise

    def _dry_run_call(self, settings: Settings, forms: Mapping[str, Form]) -> object:
        pictures = {name: blank(form, *settings.conditioned_size) for name, form in forms.items()}
        video = VideoState(0, ConditioningFrames(as_given=pictures))
        call = arguments(self.interface, settings, video, self.own)
        if "output_type" in call:
            # What comes to the host would really be made there; tiles are not followed.
            call["output_type"] = "latent" if _is_tiled(settings) else "pt"
        pipe = self._pipe
        set_tiling(pipe, settings)
        set_guidance(pipe, self.interface, settings)
        modules = [part for module in self.modules.values() for part in module.modules()]
        blocks = all_blocks(getattr(pipe, "_blocks", None))
        with (
            quiet_libraries(even_errors=True),
            no_progress_bars(pipe),
            stand_in_accepted([pipe, *blocks, *pipe.components.values(), *modules]),
        ):
            return call_checked(pipe, call, modules)


def _is_plain(given: object) -> bool:
    """Whether all of it is in its text, as of numbers and words."""
    if isinstance(given, Mapping):
        return all(map(_is_plain, given.values()))
    if isinstance(given, (list, tuple)):
        return all(map(_is_plain, given))
    return given is None or isinstance(given, (bool, int, float, str))


def _content_of(given: object) -> object:
    """What a call depends on: the values of a tensor, the state of a file or folder of frames."""
    if isinstance(given, Mapping):
        return {str(name): _content_of(each) for name, each in given.items()}
    if isinstance(given, (list, tuple)):
        return [*map(_content_of, given)]
    if isinstance(given, (torch.Tensor, np.ndarray)):
        return digest_call("", given, {})
    if isinstance(given, (str, os.PathLike)) and os.path.exists(given):
        path = Path(given)
        return str(path), file_states(path.iterdir() if path.is_dir() else [path])
    return given


def _is_tiled(settings: Settings) -> bool:
    return bool(settings.option("vae_tiling", False))


def _narrow_tables(module: nn.Module) -> None:
    """Cast float64 buffers to float32: diffusers casts them with the weights on loading."""
    for name, table in list(module.named_buffers()):
        if table.dtype == torch.float64:
            owner, _, own = name.rpartition(".")
            module.get_submodule(owner)._buffers[own] = table.float()


def _outputs(name: str, module: nn.Module) -> tuple[str, ...]:
    return outputs_of(module)
