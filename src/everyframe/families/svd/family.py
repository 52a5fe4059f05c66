"""The Stable Video Diffusion family: a picture becomes a video, with diffusers' modules.

Upstream: Stability-AI/generative-models, released as `stable-video-diffusion-img2vid`, `-xt` and
`-xt-1-1`; diffusers' `StableVideoDiffusionPipeline` is what results are held against. Read next:
`checkpoint.py` (what lies where), `settle.py` (request to settings), `components.py` (parts and
memory), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from everyframe.checkpoints.find import Location
from everyframe.core.options import FamilyOptions
from everyframe.core.plan import Plan, Settings
from everyframe.core.request import Request
from everyframe.families.dealing import dealt_part
from everyframe.families.family import (
    Component,
    Crew,
    RankPart,
    Rehearsal,
    Saving,
    Stage,
)
from everyframe.families.staged import StagedModel
from everyframe.families.svd import settle
from everyframe.families.svd.checkpoint import Files, find_files
from everyframe.families.svd.components import Sizes, components, sent_bytes
from everyframe.families.svd.config import SVDConfig
from everyframe.families.svd.options import SVDOptions
from everyframe.families.svd.rehearsals import rehearsals, savings
from everyframe.parallel.grid import Deal, Grid

if TYPE_CHECKING:
    from everyframe.checkpoints.strict import KeyMap
    from everyframe.checkpoints.tensors import TensorFile
    from everyframe.parallel.team import Teams


@dataclass(frozen=True)
class SVDModel(StagedModel[SVDOptions, Files, Sizes]):
    """One checkpoint of this family, its configs read and its weights not."""

    title: str
    led = ("image_encoder",)
    ways = ("",)
    in_step = True
    apart = False

    @property
    def config(self) -> SVDConfig:
        """The configs of the parts."""
        return self.sizes.config

    def settle(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Every value of the request settled, and notes."""
        settings, notes = settle.settle(self.config, self.title, request, self.options, seed)
        frames = self.files.assumed_frames
        if frames is not None and request.num_frames is None and request.seconds is None:
            notes += (
                f"{self.files.where} does not tell whether it was trained on 14 or 25 frames; by "
                f"its name it is taken for {frames} (num_frames sets another length)",
            )
        if self.files.stands_in is not None:
            notes += (f"its {self.files.stands_in} weights are read: no others are on this disk",)
        return settings, notes

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        """Settings like these that need less memory."""
        return settle.smaller(self.config, settings)

    def components(self, settings: Settings) -> tuple[Component, ...]:
        """Image encoder, autoencoder, denoiser."""
        return components(self.sizes, self.files.where)

    def rehearsals(self, settings: Settings) -> tuple[Rehearsal, ...]:
        """A call of every stage."""
        return rehearsals(self.sizes, settings)

    def num_branches(self, settings: Settings) -> int:
        """With guidance two, with the picture and without."""
        return 2 if settings.guidance_scale > 1 else 1

    def rank_part(self, settings: Settings, crew: Crew, rank: int, element_bytes: int) -> RankPart:
        """Pixels of the latents in time, whole frames in space; what is sent between the two."""
        frames, _, rows, columns = settle.latent_shape(self.config, settings)
        grid = Grid(self.num_branches(settings), frames, rows * columns)
        deal = Deal(grid, crew.weights, crew.groups)
        unet = self.sizes.empty("unet")
        sent = sent_bytes(unet, (rows, columns), deal, rank, element_bytes)
        return dealt_part(deal, rank, sent, "work in space")

    def shared_rehearsals(self, settings: Settings, teams: Teams) -> tuple[Rehearsal, ...]:
        """A call of every stage as one of several ranks makes it."""
        return rehearsals(self.sizes, settings, teams.team, teams.groups)

    def savings(self, component: str, settings: Settings) -> Iterator[Saving]:
        """Ways to run a component in less memory."""
        return savings(self.config, component, settings, self.options)

    def fetched(self) -> SVDModel:
        """The same model with all of its files on this disk."""
        return _model(self.name, self.title, self.files.fetched(), self.options)

    def weights(self, component: str) -> tuple[TensorFile, KeyMap]:
        """Where a component's weights are, and how their names become the module's."""
        return self.files.weights(component)

    def shared_stages(self, plan: Plan, clip: int, teams: Teams) -> Sequence[Stage]:
        """Picture, its latents, denoise, decode."""
        from everyframe.families.svd.decoding import DecodeStage, EncodeStage
        from everyframe.families.svd.job import Job
        from everyframe.families.svd.stages import DenoiseStage, ImageStage

        assert clip == 0, "a chain is refused when the request is settled"
        job = Job(plan, self, teams)
        return (ImageStage(job), EncodeStage(job), DenoiseStage(job), DecodeStage(job))


class StableVideoDiffusion:
    """The family object of the registry."""

    name = "svd"
    title = "Stable Video Diffusion"
    options: type[FamilyOptions] = SVDOptions

    def recognise(self, location: Location, options: FamilyOptions) -> SVDModel | None:
        """The model at that place if it is a Stable Video Diffusion, by its configs alone."""
        assert isinstance(options, SVDOptions)
        files = find_files(location, options.variant)
        if files is None:
            return None
        known = location.known
        title = known.title if known else f"{self.title} ({PurePath(location.name).name})"
        if files.assumed_frames is not None:
            # The title goes into the record, and what was assumed with it.
            title = f"{title}, taken for the model of {files.assumed_frames} frames"
        return _model(location.name, title, files, options)


def _model(name: str, title: str, files: Files, options: SVDOptions) -> SVDModel:
    config = SVDConfig.from_json(files.where, files.configs())
    return SVDModel(name, options, files, Sizes(config), title)


SVD = StableVideoDiffusion()
