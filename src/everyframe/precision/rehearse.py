"""The dry run: a component is called as in a real run, on tensors that have sizes and no numbers.

The module is on torch's meta device with its precision put on from outside, as in a real run; meta
stands for the device of the plan, whose facts come along as data. Every operation is held against
`rules`, its results are counted while they live (`live`), and its work is added up (`work`). So a
dtype clash, the peak of memory and the amount of work are known without the hardware, the weights
or the time. What depends on numbers (``if mask.all()``) is answered with no. Host tensors are real
and small. Read next: `everyframe.families.family.Rehearsal`, `everyframe.planning.forecast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.precision import edges, rules
from everyframe.precision.islands import in_island
from everyframe.precision.live import LiveBytes
from everyframe.precision.rules import Finding
from everyframe.precision.work import Work, WorkCounter
from everyframe.precision.workspace import workspace

#: The device that stands for the plan's; it computes shapes and dtypes.
STAND_IN = "meta"

#: A broken module repeats itself; so many findings are kept of each component.
MAX_FINDINGS = 20


@dataclass(frozen=True)
class Rehearsed:
    """What a dry run of one call found.

    `working_bytes` is the peak of what was alive beside the parameters, at `peak_at`; `seen` holds
    each (module, operation, dtype of its first operand) once, in order.
    """

    num_operations: int
    findings: tuple[Finding, ...]
    working_bytes: int
    peak_at: str
    work: Work
    seen: tuple[tuple[str, str, str], ...]

    def dtypes_in(self, part: str) -> frozenset[str]:
        """Floating dtypes that operations took in the modules of that name or pattern."""
        return frozenset(
            dtype for module, _, dtype in self.seen if dtype and in_island(module or ".", (part,))
        )


def rehearse(
    module: nn.Module,
    precision: Precision | None,
    call: Callable[[Any, str], object],
    device: DeviceFacts,
    outputs: tuple[str, ...] = ("",),
) -> Rehearsed:
    """Run ``call(module, STAND_IN)`` dry and say what it found.

    `module` is without weights and is given back as it was, but for the dtype of its parameters,
    which say nothing. With `precision` None the module is taken as it is, whoever cast it.
    """
    module.to(STAND_IN).eval().requires_grad_(False)
    put_on = edges.apply(module, precision, outputs) if precision is not None else None
    run = _Run(device, precision.islands if precision is not None else ())
    try:
        # In inference mode some questions (`if mask.all()`) are not taken apart into operations.
        with torch.inference_mode(False), torch.no_grad():
            _followed(call, module, run)
    finally:
        if put_on is not None:
            put_on.remove()
    return Rehearsed(
        num_operations=run.num_operations,
        findings=tuple(dict.fromkeys(run.findings)),
        working_bytes=run.live.peak,
        peak_at=run.live.peak_at,
        work=run.work.total(),
        seen=tuple(run.seen),
    )


def _followed(call: Callable[[Any, str], object], module: nn.Module, run: _Run) -> None:
    with _names(module, run.names), _Attention(run), run:
        _until_it_fails(call, module)


class _Failed(Exception):  # noqa: N818 - never leaves this module
    """An operation raised; what it said is among the findings."""


def _until_it_fails(call: Callable[[Any, str], object], module: nn.Module) -> None:
    try:
        call(module, STAND_IN)
    except _Failed:
        return


@contextmanager
def _names(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Keeps the dotted name of the module that runs on top of `names`."""

    def entering(name: str) -> Callable[..., None]:
        return lambda *_: names.append(name)

    def leaving(*_: object) -> None:
        names.pop()

    handles = []
    for name, part in module.named_modules():
        # Before our casts at the edges, so that these count as the module's own.
        handles.append(part.register_forward_pre_hook(entering(name), prepend=True))
        handles.append(part.register_forward_hook(leaving, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Attention(TorchFunctionMode):
    """Fused attention as one operation: on meta torch would take it apart into another one."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention and args and args[0].device.type == STAND_IN:
            return self._run.attention(*args, **given)
        try:
            return func(*args, **given)
        except RuntimeError as error:
            # Some functions compare dtypes before any operation is reached.
            self._run.fails(str(getattr(func, "__name__", func)), error)


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation on the stand-in device."""

    def __init__(self, device: DeviceFacts, islands: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.islands = device, islands
        self.names: list[str] = []
        self.live, self.work = LiveBytes(), WorkCounter()
        self.findings: list[Finding] = []
        self.seen: dict[tuple[str, str, str], None] = {}
        self.num_operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        operation = func._schema.name
        tensors = _on_device((args, given))
        if operation == "aten::_local_scalar_dense" and tensors:
            return (
                False
                if tensors[0].dtype == torch.bool
                else tensors[0].new_zeros((), device="cpu").item()
            )
        if operation == "aten::_to_copy" and tensors and _goes_to_host(given):
            # What comes to the host has no numbers either; one element stands for all of them.
            dtype = given.get("dtype") or tensors[0].dtype
            return torch.zeros((), dtype=dtype, device="cpu").expand(tensors[0].shape)
        if operation == "aten::copy_" and tensors and args[0].device.type != STAND_IN:
            return args[0]
        if tensors and self.device.kind == "cpu":
            # There, both are the same memory.
            args, given = tree_map(_to_stand_in, (args, given))
        if not tensors and not _made_on_device(given):
            return func(*args, **given)
        return self._operation(func, operation, args, given)

    def _operation(self, func: Any, operation: str, args: Any, kwargs: dict[str, Any]) -> Any:
        self.num_operations += 1
        tensors = _on_device((args, kwargs))
        clashes = list(rules.check_operands(operation, args, self.device))
        self._find(operation, clashes)
        if clashes:
            args = _widened(args)  # to see what comes after
        self.live.known(tensors)
        try:
            answer = func(*args, **kwargs)
        except RuntimeError as error:
            self.fails(operation, error)
        results = [each for each in tree_leaves(answer) if isinstance(each, Tensor)]
        place = self._place(operation)
        self.live.made(results, place)
        self.live.workspace(workspace(operation, tensors, results, self.device), place)
        if not func.is_view:
            self.work.operation(func, args, tensors, results)
            self._check(operation, args, tensors, results)
        return answer

    def fails(self, operation: str, error: RuntimeError) -> NoReturn:
        """An operation raised: a finding, and the end of this run."""
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        self._find(operation, [("fails", said)])
        raise _Failed from error

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The result of fused attention, laid out as the kernels lay it out, and its costs."""
        self.num_operations += 1
        self._find("attention", rules.check_attention(query, key, value, attn_mask))
        tensors = [query, key, value]
        batch, heads, length, _ = query.shape
        out = value.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
        place = self._place("attention")
        if self.device.kind == "mps":  # its scores are a tensor
            scores = batch * heads * length * key.shape[-2] * query.element_size()
            self.live.workspace(scores, place)
        self.work.attention(query, key, value, attn_mask)
        self._check("attention", (), tensors, [out])
        return out

    def _check(
        self, operation: str, args: Any, tensors: list[Tensor], results: list[Tensor]
    ) -> None:
        self._find(operation, rules.check_device(operation, tensors, results, self.device))
        self._find(operation, rules.check_statistics(operation, args, tensors))
        module = self.names[-1] if self.names else ""
        floating = [t for t in (tensors or results) if t.is_floating_point()]
        if module and in_island(module, self.islands):
            self._find(operation, rules.check_island(operation, floating))
        dtype = str(floating[0].dtype).removeprefix("torch.") if floating else ""
        self.seen[module, operation, dtype] = None

    def _find(self, operation: str, problems: Any) -> None:
        for kind, problem in problems:
            if len(self.findings) < MAX_FINDINGS or kind in rules.FATAL:
                module = self.names[-1] if self.names else ""
                short = operation.removeprefix("aten::")
                self.findings.append(Finding(kind, module, short, problem))

    def _place(self, operation: str) -> str:
        module = self.names[-1] if self.names else "around the model"
        return f"{module}: {operation.removeprefix('aten::')}"


def _on_device(values: Any) -> list[Tensor]:
    return [
        each
        for each in tree_leaves(values)
        if isinstance(each, Tensor) and each.device.type == STAND_IN
    ]


def _goes_to_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type != STAND_IN


def _made_on_device(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == STAND_IN


def _to_stand_in(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.ndim:
        return torch.empty_like(value, device=STAND_IN)
    return value


def _widened(args: Any) -> Any:
    """Floating tensors among the operands brought to the widest dtype of all."""
    dtypes = [t.dtype for t in _on_device(args) if t.is_floating_point()]
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)

    def widen(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return torch.empty_like(value, dtype=widest) if floats else value

    return tree_map(widen, args)
