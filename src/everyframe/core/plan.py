"""What will run: the request with every value settled, and where each part of the model runs.

Plans are frozen and printable, and are made by `everyframe.planning.resolve` alone. Nothing was
loaded or fetched to make one. Read next: `everyframe.engine`, which runs them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from everyframe.core.facts import DeviceFacts


@dataclass(frozen=True)
class Settings:
    """The request, settled: sizes in pixels, `num_frames` per clip, options by flag name.

    `nominal_size` (height, width) is the size as it was named, where the model is told that one and
    works in steps that do not hit it (240p is 240x426 to Open-Sora 1.2, which makes 240x424).
    `prompt` is empty for a model that takes none. `fit` is how given pictures are brought to the
    size (``crop``, ``pad``, ``stretch``), None where the family wants them as they were given.
    """

    prompt: str
    negative_prompt: str | None
    height: int
    width: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    seed: int
    num_videos: int = 1
    chain: int = 1
    edit_strength: float = 0.0
    given_frames: tuple[str, ...] = ()
    nominal_size: tuple[int, int] | None = None
    fit: str | None = "crop"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def told_size(self) -> tuple[int, int]:
        """(height, width) that the model is told: the nominal one where there is one."""
        return self.nominal_size or (self.height, self.width)

    def option(self, name: str) -> Any:
        """The settled value of a family's own option."""
        return dict(self.options)[name]

    def for_seed(self, seed: int) -> Settings:
        """The settings of one video out of several."""
        return replace(self, seed=seed, num_videos=1)


@dataclass(frozen=True)
class Precision:
    """Dtypes of one component by torch's names, and the parts that stay in float32 at least."""

    parameters: str
    compute: str
    islands: tuple[str, ...] = ()


@dataclass(frozen=True)
class ComponentPlan:
    """One part of the model: what it is read from, where and in which precision it runs.

    `weight_bytes` is what its parameters take in that precision, `working_bytes` the forecast peak
    of everything else while it runs.
    """

    name: str
    title: str
    stage: str
    source: str
    num_parameters: int
    device: str
    precision: Precision
    weight_bytes: int
    working_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Forecast of the memory that this component needs while it is loaded."""
        return self.weight_bytes + self.working_bytes


@dataclass(frozen=True)
class Plan:
    """Everything that will happen, in the order of the stages."""

    model: str
    family: str
    title: str
    settings: Settings
    device: DeviceFacts
    num_threads: int
    components: tuple[ComponentPlan, ...]
    to_fetch: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    obstacle: str | None = None

    def component(self, name: str) -> ComponentPlan:
        """The component of that name."""
        return next(part for part in self.components if part.name == name)

    @property
    def peak_bytes(self) -> int:
        """The largest stage, not the sum: components are loaded one at a time."""
        return max(part.peak_bytes for part in self.components)

    def for_seed(self, seed: int) -> Plan:
        """The plan of one video out of several."""
        return replace(self, settings=self.settings.for_seed(seed))

    def to_json(self) -> dict[str, Any]:
        """Plain data for printing, events and records."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}
