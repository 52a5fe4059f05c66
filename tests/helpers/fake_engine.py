"""A stand-in for the engine: real events and plans, made-up frames, no torch.

Run as a program it is the command line with this engine in place of the real one, for tests that
need a process of their own: ``python fake_engine.py SECONDS_A_STEP WORDS…``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from everyframe.core.errors import CannotRunError
from everyframe.core.events import (
    ComponentLoaded,
    Event,
    FramesDecoded,
    Note,
    Planned,
    StageDone,
    StageStarted,
    Step,
    VideoDone,
    WeightsReady,
)
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import ComponentPlan, Plan, Precision, Settings, StagePlan
from everyframe.core.request import Request

GIB = 2**30
NUM_STEPS = 12


def plan_of(request: Request, obstacle: str | None = None) -> Plan:
    """A plan of three components that follows the request."""
    height, width = request.asked_size() or (64, 64)
    precision = Precision("bfloat16", "bfloat16", ("timestep_embedding", "final_layer"))
    device = DeviceFacts("Some CPU", "cpu", None, 16 * GIB, 12 * GIB)
    parts = [("text", "T5 encoder"), ("denoise", "STDiT3 denoiser"), ("decode", "autoencoder")]
    components = tuple(
        ComponentPlan(name, title, name, "x", 10**6, "cpu", precision, 4 * 10**6, 30 * 10**6)
        for name, title in parts
    )
    settings = Settings(
        prompt=request.prompt or "",
        negative_prompt=None,
        height=height,
        width=width,
        num_frames=request.num_frames or 4,
        fps=12,
        num_inference_steps=NUM_STEPS,
        guidance_scale=7.0,
        seed=5 if request.seed is None else request.seed,
        num_videos=request.num_videos,
        chain=request.chain,
        options=(("aesthetic", request.family_options.get("aesthetic")),),
    )
    notes = ("a note of the plan",)
    return Plan("fake", "opensora", "a fake", settings, device, 2, components, (), notes, obstacle)


class FakeEngine:
    """Gives events as the real engine does; `pause` is the time of a step in seconds."""

    def __init__(
        self,
        pause: float = 0.0,
        obstacle: str | None = None,
        failure: BaseException | None = None,
        nan: bool = False,
    ) -> None:
        self.pause = pause
        self.obstacle = obstacle
        self.failure = failure
        self.nan = nan
        self.requests: list[Request] = []

    def resolve(self, request: Request, profile: str | None = None) -> Plan:
        """As `everyframe.planning.resolve.resolve`."""
        plan = plan_of(request, self.obstacle)
        if profile is None:
            return plan
        stages = (StagePlan("denoise", "denoise", 30 * 10**6, 500, 3e12, 42.0),)
        clashes = ("denoise: blocks.0: mm: operands in two dtypes",) if self.obstacle else ()
        return replace(plan, profile=profile, stages=stages, dtype_errors=clashes, rates="made up")

    def stream(
        self, request: Request, *, num_threads: int | None = None, keep: Any = None
    ) -> Iterator[Event]:
        """As `everyframe.engine.run.stream`."""
        self.requests.append(request)
        plan = plan_of(request, self.obstacle)
        yield Planned(plan)
        if plan.infeasible:
            raise CannotRunError(plan.infeasible)
        yield WeightsReady({})
        yield from (Note(note) for note in plan.notes)
        for clip in range(plan.settings.chain):
            yield from self._clip(plan, clip)
        for seed in self._seeds(plan):
            record = {"request": {"prompt": request.prompt, "seed": seed}, "plan": {}}
            yield VideoDone(seed, plan.settings.num_frames * plan.settings.chain, record)

    def _seeds(self, plan: Plan) -> range:
        return range(plan.settings.seed, plan.settings.seed + plan.settings.num_videos)

    def _clip(self, plan: Plan, clip: int) -> Iterator[Event]:
        for stage, num_steps in (("text", 1), ("denoise", NUM_STEPS), ("decode", 2)):
            yield StageStarted(stage, num_steps, clip, plan.settings.chain)
            time.sleep(self.pause)
            yield ComponentLoaded(stage, self.pause)
            for step in range(num_steps):
                time.sleep(self.pause)
                if stage == "decode":
                    for seed in self._seeds(plan):
                        yield self._frames(plan, seed)
                    if self.failure is not None:
                        raise self.failure
                yield Step(stage, step + 1, num_steps, plan.settings.seed, self.pause)
            yield StageDone(stage, num_steps * self.pause)

    def _frames(self, plan: Plan, seed: int) -> FramesDecoded:
        settings = plan.settings
        shape = (settings.num_frames // 2, settings.height, settings.width, 3)
        frames = np.full(shape, (seed % 10) / 10, np.float32)
        if self.nan:
            frames[0, 0, 0, 0] = np.nan
        return FramesDecoded(seed, len(frames), frames)

    def modules(self) -> dict[str, ModuleType]:
        """The modules that this engine takes the place of."""
        run, resolve = (
            ModuleType("everyframe.engine.run"),
            ModuleType("everyframe.planning.resolve"),
        )
        run.stream = self.stream  # type: ignore[attr-defined]
        resolve.resolve = self.resolve  # type: ignore[attr-defined]
        return {run.__name__: run, resolve.__name__: resolve}


def changed(plan: Plan, **values: Any) -> Plan:
    """The plan with other settings."""
    return replace(plan, settings=replace(plan.settings, **values))


def main(pause: float, words: Sequence[str]) -> int:
    """The command line with this engine, for good: for a process of its own."""
    from everyframe.cli.main import main as command_line

    sys.modules.update(FakeEngine(pause).modules())
    return command_line(words)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
