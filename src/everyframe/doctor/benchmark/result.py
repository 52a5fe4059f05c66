"""Result of `everyframe bench`: its data, and its file. It contains nothing private."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from everyframe.core.errors import InputError
from everyframe.core.options import explain
from everyframe.core.paths import check_path, replace_file

SCHEMA = 1
_MOST_BYTES = 1 << 20


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BenchedMachine(_Data):
    """The machine, without names of its owner: device, processor, memory in bytes, versions."""

    device: str
    kind: str
    memory: int
    capability: str | None = None
    processor: str
    instructions: str
    num_cores: int
    num_threads: int
    host_memory: int
    system: str
    versions: dict[str, str]


_Positive = Annotated[float, Field(gt=0)]


class PeakResult(_Data):
    """One peak: ``float32`` and so on in operations a second, a copy in bytes a second."""

    name: str
    kind: Literal["product", "copy"]
    rate: _Positive
    size: int


class FastPathResult(_Data):
    """One fast path on the synthetic block: its verdict, error, and times plain torch's speed."""

    name: str
    verdict: str
    gain: float | None = None
    error: float | None = None
    limit: float | None = None
    reason: str


class BlockResult(_Data):
    """The synthetic blocks at one size.

    Attributes:
        work: description of the work; only results of equal work are compared.
        precision: dtype of the computation.
        seconds: of one step by the certified fast paths; `plain_seconds` without any.
        operations: of one step.
        peak_bytes: memory measured, None where the system reports none.
        forecast_bytes: memory that a plan forecasts.
        forecast_seconds: time that a plan forecasts, for plain torch.
    """

    work: str
    precision: str
    paths: tuple[str, ...] = ()
    seconds: _Positive
    plain_seconds: _Positive
    operations: float
    peak_bytes: int | None = None
    forecast_bytes: int
    forecast_seconds: float | None = None


class VideoResult(_Data):
    """A video of the embedded model.

    Attributes:
        work: what was made.
        precision: of the denoiser.
        import_seconds: until the engine is imported.
        first_frame_seconds: from the call to its first frame, in a process that has imported it.
        seconds: of the whole first video; `warm_seconds` of the second one in that process.
        steps_per_second: of the second video.
    """

    work: str
    precision: str
    import_seconds: float
    first_frame_seconds: _Positive
    seconds: _Positive
    warm_seconds: _Positive
    steps_per_second: _Positive


class BenchResult(_Data):
    """Everything that was measured on a machine."""

    type: Literal["bench"] = "bench"
    schema_number: Literal[1] = Field(default=1, alias="schema")
    everyframe: str
    date: str
    load: float = Field(description="Processes that wanted a core as it began, for each core.")
    machine: BenchedMachine
    peaks: tuple[PeakResult, ...] = ()
    fast_paths: tuple[FastPathResult, ...] = ()
    blocks: tuple[BlockResult, ...] = ()
    video: VideoResult | None = None
    failed: dict[str, str] = Field(default_factory=dict, description="Part -> how it ended.")
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return self.model_dump(mode="json", by_alias=True)


def write_result(result: BenchResult, path: Path) -> None:
    """Write a result as indented JSON.

    Raises:
        OSError: the file can't be written.
    """
    replace_file(path, json.dumps(result.to_json(), indent=1) + "\n")


def read_result(given: str | Path) -> BenchResult:
    """Read a result.

    Raises:
        InputError: the file is none, or of another schema.
    """
    path = Path(check_path(given, "the result"))
    try:
        is_too_large = path.stat().st_size > _MOST_BYTES
        data = None if is_too_large else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} can't be read as JSON: {error}") from None
    if is_too_large:
        raise InputError(f"{path} is too large for a result of everyframe bench")
    if not isinstance(data, dict) or data.get("type") != "bench":
        raise InputError(f"{path} is no result of everyframe bench")
    if data.get("schema") != SCHEMA:
        raise InputError(
            f"{path} is of schema {data.get('schema')!r} and this version reads {SCHEMA}; "
            "measure again with this version"
        )
    try:
        return BenchResult.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error)}") from None
