"""Dry-run result as a value: findings, peak memory, work. Imports no torch.

It is saved as JSON; reading checks every field, as the file may have been edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from everyframe.core.facts import OpShape

#: Finding kinds that stop a run or make it wrong; the others cost time or digits.
FATAL = frozenset({"clash", "missing", "too large", "island", "fails"})


@dataclass(frozen=True)
class DryRunFinding:
    """A problem that a plan would meet on its device, and where.

    `kind` is one of:
      ``clash``: two dtypes in one operation;
      ``missing``: a dtype that the device does not have;
      ``too large``: a tensor that the device can't address;
      ``island``: narrow compute where the plan says float32;
      ``fails``: the operation raises;
      ``emulated``: the device has no instructions for the dtype;
      ``narrow``: statistics in half precision.

    `module` is the dotted name in the component, empty outside of it.
    """

    kind: str
    module: str
    operation: str
    problem: str

    @property
    def is_fatal(self) -> bool:
        """Whether the run would break or give garbage there."""
        return self.kind in FATAL

    def __str__(self) -> str:
        place = self.module or "around the model"
        return f"{place}: {self.operation}: {self.problem}"


@dataclass(frozen=True)
class Work:
    """Work of one call.

    Attributes:
        products: matrix products, convolutions and attentions, with their FLOPs.
        moved_bytes: bytes read and written by all other operations.
        num_kernels: number of kernels.
        mapped_bytes: bytes of results so large that the allocator asks the system for each.
    """

    products: tuple[tuple[OpShape, float], ...] = ()
    moved_bytes: int = 0
    num_kernels: int = 0
    mapped_bytes: int = 0

    @property
    def operations(self) -> float:
        """FLOPs of all products: multiplications and additions."""
        return sum(operations for _, operations in self.products)


@dataclass(frozen=True)
class DryRunResult:
    """Result of a dry run of one call.

    Attributes:
        num_operations: operations recorded.
        num_passes: times that the component was called, such as once for each guidance branch; 1 if
            only modules inside it were.
        findings: problems, each once.
        working_bytes: peak of live memory beside the parameters.
        peak_at: where that peak was.
        work: FLOPs, bytes and kernels.
        seen: (module, operation, dtype of its first operand), each once, in order.
    """

    num_operations: int
    num_passes: int
    findings: tuple[DryRunFinding, ...]
    working_bytes: int
    peak_at: str
    work: Work
    seen: tuple[tuple[str, str, str], ...]

    @property
    def clashes(self) -> bool:
        """Whether two dtypes met in an operation that requires one."""
        return any(finding.kind == "clash" for finding in self.findings)


@dataclass(frozen=True)
class DryRunResults:
    """Results of a dry run by component; those that foreign code did not finish are missing.

    Attributes:
        found: result by component.
        stopped: why foreign code stopped early; empty if it did not.
        at: the component in which it stopped.
        returned: what the call returned; of a pipeline's, (frames, height, width) or None.
    """

    found: Mapping[str, DryRunResult]
    stopped: str = ""
    at: str = ""
    returned: object = None


def results_to_json(results: DryRunResults) -> dict[str, Any]:
    """Plain data of results of code that did not stop; `results_from_json` reads it."""
    found = {name: result_to_json(each) for name, each in results.found.items()}
    return {"found": found, "returned": results.returned}


def results_from_json(data: Any) -> DryRunResults | None:
    """Results from plain data; None if the data is not of dry runs."""
    if not isinstance(data, dict) or not isinstance(data.get("found"), dict):
        return None
    found = {name: result_from_json(each) for name, each in data["found"].items()}
    whole = {name: each for name, each in found.items() if each is not None}
    try:
        made = data.get("returned")
        returned = None if made is None else tuple(map(_number, made))
    except TypeError:
        return None
    is_size = returned is None or len(returned) == 3  # frames, height, width
    return DryRunResults(whole, returned=returned) if is_size and len(whole) == len(found) else None


def result_to_json(result: DryRunResult) -> dict[str, Any]:
    """Plain data of a result; `result_from_json` reads it."""
    work = result.work
    return {
        "num_operations": result.num_operations,
        "num_passes": result.num_passes,
        "findings": [[f.kind, f.module, f.operation, f.problem] for f in result.findings],
        "working_bytes": result.working_bytes,
        "peak_at": result.peak_at,
        "products": [
            [p.kind, p.dtype, p.shapes, p.parameters, number] for p, number in work.products
        ],
        "moved": [work.moved_bytes, work.num_kernels, work.mapped_bytes],
        "seen": result.seen,
    }


def result_from_json(data: Any) -> DryRunResult | None:
    """Result from plain data; None if the data is not of a dry run."""
    try:
        moved, kernels, mapped = map(_number, data["moved"])
        return DryRunResult(
            num_operations=_number(data["num_operations"]),
            num_passes=_number(data["num_passes"]),
            findings=tuple(DryRunFinding(*_texts(each, 4)) for each in data["findings"]),
            working_bytes=_number(data["working_bytes"]),
            peak_at=_text(data["peak_at"]),
            work=Work(tuple(map(_product, data["products"])), moved, kernels, mapped),
            seen=tuple((a, b, c) for a, b, c in (_texts(each, 3) for each in data["seen"])),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _product(data: Any) -> tuple[OpShape, float]:
    kind, dtype, shapes, parameters, number = data
    each = tuple(tuple(_number(size) for size in shape) for shape in shapes)
    return OpShape(_text(kind), _text(dtype), each, tuple(map(_parameters, parameters))), _number(
        number
    )


def _parameters(data: Any) -> Any:
    """Parse numbers, strings, and rows of them: the arguments of `torch.convolution`."""
    if isinstance(data, list):
        return tuple(map(_parameters, data))
    return data if isinstance(data, (bool, int, str)) else _refuse(data)


def _texts(data: Any, number: int) -> list[str]:
    if not isinstance(data, list) or len(data) != number:
        raise TypeError(f"not {number} texts: {data!r}")
    return [_text(each) for each in data]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _refuse(value)


def _number(value: Any) -> int:
    """Parse a count: an integer of 0 or more."""
    return value if type(value) is int and value >= 0 else _refuse(value)


def _refuse(value: Any) -> NoReturn:
    raise TypeError(f"not of a dry run: {value!r}")
