"""ControlNet inpainting specs: repaint the masked part of an image or video.

Upstream: Stable Diffusion 1 and 2 in diffusers' folders, with the ControlNets of lllyasviel and
others. Results are compared with diffusers' `StableDiffusionControlNetInpaintPipeline`. Read next:
`checkpoint.py` (files), `settings.py` (request to settings), `inputs.py` (source, mask, control),
`components.py` (components and memory), `stages.py` (the run).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING

from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.families.inpaint import settings as request_settings
from everyframe.families.inpaint.checkpoint import InpaintFiles, keys_of
from everyframe.families.inpaint.components import InpaintBuilder, components, controlnet_name
from everyframe.families.inpaint.config import InpaintConfig
from everyframe.families.inpaint.dry_run import dry_run_calls, memory_savings
from everyframe.families.inpaint.options import InpaintOptions
from everyframe.families.inpaint.scheduler import num_timesteps
from everyframe.runtime.interface import (
    Component,
    DryRunCall,
    MemorySaving,
    RankShare,
    VideoGroup,
)
from everyframe.runtime.model_spec import NativeModelSpec
from everyframe.runtime.rank_shares import active_ranks, batch_share

if TYPE_CHECKING:
    from pathlib import Path

    from everyframe.checkpoints.key_map import KeyMap
    from everyframe.parallel.communicator import ParallelContext


@dataclass(frozen=True)
class InpaintSpec(NativeModelSpec[InpaintOptions, InpaintFiles, InpaintBuilder]):
    """One inpainting checkpoint: configs read, weights not loaded."""

    title: str
    led = ("text_encoder",)
    ways = ("",)
    in_step = False
    apart = False

    def settle(self, request: Request, seed: int) -> tuple[Settings, tuple[str, ...]]:
        """Resolve the request: settings, and notes for the user."""
        facts = request_settings.InpaintFacts(
            self.title, self.sizes.config, self.files.pipeline, self.files.has_safety_checker
        )
        return request_settings.resolve_settings(facts, request, self.options, seed)

    def unread(self, settings: Settings) -> tuple[str, ...]:
        """Prompt words cut because they exceed CLIP's length."""
        if self.files.folder is None:
            return ()
        from everyframe.families.inpaint.text import load_tokenizer, tokens_of
        from everyframe.runtime.repairs import prompt_truncated_note

        tokenizer = load_tokenizer(self.files.part("tokenizer"))
        tokens = tokens_of(tokenizer, settings, self.sizes.config.num_tokens)
        return tuple(prompt_truncated_note(cut).text for *_, cut in tokens if cut)

    def smaller(self, settings: Settings) -> Iterator[Settings]:
        """Yield similar settings that need less memory."""
        return request_settings.smaller_settings(settings)

    def components(self, settings: Settings) -> tuple[Component, ...]:
        """Text encoder, autoencoder, ControlNets, denoiser."""
        where = self.files.where
        places = {name: f"{where}/{name}" for name in ("text_encoder", "vae", "unet")}
        places |= {
            controlnet_name(number): net.where for number, net in enumerate(self.files.controlnets)
        }
        return components(self.sizes, places)

    def rehearsals(self, settings: Settings) -> tuple[DryRunCall, ...]:
        """Dry-run calls of every stage on one device."""
        return dry_run_calls(self, settings)

    def num_branches(self, settings: Settings) -> int:
        """Always one: each rank has whole frames with both guidance branches."""
        return 1

    def rank_part(
        self, settings: Settings, crew: VideoGroup, rank: int, element_bytes: int
    ) -> RankShare:
        """Share of one rank: whole batches of frames; their latents are sent when done."""
        config, together = self.sizes.config, int(settings.option("frames_at_once"))
        strength, steps = float(settings.option("strength")), settings.num_inference_steps
        frames = prod(request_settings.latent_shape(config, settings)) * together
        # Once a round, so a little of it at each of its steps.
        sent = (
            4 * frames * (len(crew.weights) - 1) // num_timesteps(config.scheduler, steps, strength)
        )
        batches = ceil(request_settings.num_painted(settings) / together)
        how = "--frames-at-once 1 has a batch for each frame"
        return batch_share(batches, crew.weights, rank, sent, how)

    def shared_rehearsals(
        self, settings: Settings, teams: ParallelContext
    ) -> tuple[DryRunCall, ...]:
        """Dry-run calls of every stage as one of several ranks runs it."""
        return dry_run_calls(self, settings, len(active_ranks(teams.team.weights)))

    def savings(self, component: str, settings: Settings) -> Iterator[MemorySaving]:
        """Ways to run a component in less memory."""
        return memory_savings(self.sizes.config, component, settings)

    def fetched(self) -> InpaintSpec:
        """Download missing files; return a copy with all files on disk."""
        return read_spec(self.name, self.title, self.files.fetched(), self.options)

    @property
    def components_on_disk(self) -> tuple[str, ...]:
        """Component names with the ControlNets last, because they have separate files."""
        return tuple(sorted(self.sizes.parts, key=lambda name: name.startswith("controlnet")))

    def weights(self, component: str) -> tuple[Path, KeyMap]:
        """Files of a component's weights, and their key map."""

        names = self.sizes.num_elements["text_encoder"]
        return self.files.weights(component), keys_of(component, names)


def read_spec(name: str, title: str, files: InpaintFiles, options: InpaintOptions) -> InpaintSpec:
    """Read the configs of a checkpoint."""
    config = InpaintConfig.from_json(files.where, files.configs(), files.controlnet_configs())
    return InpaintSpec(name, options, files, InpaintBuilder(config), title)
