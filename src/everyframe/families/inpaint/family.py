"""The family of ControlNet inpainting: a part of a picture or video is painted anew.

Upstream: Stable Diffusion 1 and 2 in diffusers' folders, with the ControlNets of lllyasviel and
others; diffusers' `StableDiffusionControlNetInpaintPipeline` is what results are held against.
Read next: `checkpoint.py` (what lies where), `settle.py` (request to settings), `inputs.py` (what
is given), `components.py` (parts and memory), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import PurePath
from typing import TYPE_CHECKING

from everyframe.checkpoints.find import Location
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan, Settings
from everyframe.core.request import Request
from everyframe.families.dealing import batches_part, workers
from everyframe.families.family import (
    Component,
    Crew,
    RankPart,
    Rehearsal,
    Saving,
    Stage,
)
from everyframe.families.inpaint import settle
from everyframe.families.inpaint.checkpoint import Files, find_files
from everyframe.families.inpaint.components import Sizes, components, controlnet_name
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.options import InpaintOptions
from everyframe.families.inpaint.rehearsals import rehearsals, savings
from everyframe.families.inpaint.schedulers import num_timesteps
from everyframe.families.staged import StagedModel

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.checkpoints.strict import KeyMap
    from everyframe.parallel.team import Teams


@dataclass(frozen=True)
class InpaintModel(StagedModel[InpaintOptions, Files, Sizes]):
    """One checkpoint of this family, its configs read and its weights not."""

    title: str
    led = ("text_encoder",)
    ways = ("",)
    in_step = False
    apart = False

    def settle(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Every value of the request settled, and notes."""
        facts = settle.Facts(
            self.title, self.sizes.config, self.files.pipeline, self.files.has_safety_checker
        )
        return settle.settle(facts, request, self.options, seed)

    def unread(self, settings: Settings) -> tuple[str, ...]:
        """What CLIP has no room for."""
        if self.files.folder is None:
            return ()
        from everyframe.families.inpaint.text import load_tokenizer, tokens_of
        from everyframe.families.telling import prompt_was_cut

        tokenizer = load_tokenizer(self.files.part("tokenizer"))
        tokens = tokens_of(tokenizer, settings, self.sizes.config.num_tokens)
        return tuple(prompt_was_cut(cut).text for *_, cut in tokens if cut)

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        """Settings like these that need less memory."""
        return settle.smaller(settings)

    def components(self, settings: Settings) -> tuple[Component, ...]:
        """Text encoder, autoencoder, ControlNets, denoiser."""
        where = self.files.where
        places = {name: f"{where}/{name}" for name in ("text_encoder", "vae", "unet")}
        places |= {
            controlnet_name(number): net.where for number, net in enumerate(self.files.controlnets)
        }
        return components(self.sizes, places)

    def rehearsals(self, settings: Settings) -> tuple[Rehearsal, ...]:
        """A call of every stage."""
        return rehearsals(self.sizes, settings)

    def num_branches(self, settings: Settings) -> int:
        """One: ranks have whole frames, with both branches of guidance."""
        return 1

    def rank_part(self, settings: Settings, crew: Crew, rank: int, element_bytes: int) -> RankPart:
        """Whole batches of frames; their latents are sent when they are done."""
        config, together = self.sizes.config, int(settings.option("frames_at_once"))
        strength, steps = float(settings.option("strength")), settings.num_inference_steps
        frames = prod(settle.latent_shape(config, settings)) * together
        # Once a round, so a little of it at each of its steps.
        sent = (
            4 * frames * (len(crew.weights) - 1) // num_timesteps(config.scheduler, steps, strength)
        )
        batches = ceil(settle.num_painted(settings) / together)
        how = "--frames-at-once 1 has a batch for each frame"
        return batches_part(batches, crew.weights, rank, sent, how)

    def shared_rehearsals(self, settings: Settings, teams: Teams) -> tuple[Rehearsal, ...]:
        """A call of every stage as one of several ranks makes it."""
        return rehearsals(self.sizes, settings, len(workers(teams.team.weights)))

    def savings(self, component: str, settings: Settings) -> Iterator[Saving]:
        """Ways to run a component in less memory."""
        return savings(self.sizes.config, component, settings)

    def fetched(self) -> InpaintModel:
        """The same model with all of its files on this disk."""
        return _model(self.name, self.title, self.files.fetched(), self.options)

    @property
    def components_on_disk(self) -> tuple[str, ...]:
        """ControlNets come last: they are of files of their own."""
        return tuple(sorted(self.sizes.parts, key=lambda name: name.startswith("controlnet")))

    def weights(self, component: str) -> tuple[Path, KeyMap]:
        """Where a component's weights are, and how their names become the module's."""
        from everyframe.families.inpaint.weights import keys_of

        names = self.sizes.num_elements["text_encoder"]
        return self.files.weights(component), keys_of(component, names)

    def shared_stages(self, plan: Plan, clip: int, teams: Teams) -> Sequence[Stage]:
        """Text, given frames, denoise, decode."""
        from everyframe.families.inpaint.job import Job
        from everyframe.families.inpaint.pictures import DecodeStage, EncodeStage
        from everyframe.families.inpaint.stages import DenoiseStage, TextStage

        assert clip == 0, "a chain is refused when the request is settled"
        job = Job(plan, self, teams)
        return (TextStage(job), EncodeStage(job), DenoiseStage(job), DecodeStage(job))


class ControlNetInpainting:
    """The family object of the registry."""

    name = "inpaint"
    title = "ControlNet inpainting"
    options: type[FamilyOptions] = InpaintOptions

    def recognise(self, location: Location, options: FamilyOptions) -> InpaintModel | None:
        """The model at that place if pictures can be inpainted with it, by its configs alone."""
        assert isinstance(options, InpaintOptions)
        files = find_files(location, options.controlnet)
        if files is None:
            return None
        known = location.known
        title = known.title if known else f"{self.title} ({PurePath(location.name).name})"
        return _model(location.name, title, files, options)


def _model(name: str, title: str, files: Files, options: InpaintOptions) -> InpaintModel:
    config = InpaintConfig.from_json(files.where, files.configs(), files.controlnet_configs())
    return InpaintModel(name, options, files, Sizes(config), title)


INPAINT = ControlNetInpainting()
