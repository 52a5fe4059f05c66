"""Dry-run executor: run a component's call on tensors that have shapes and no values.

The module is on torch's meta device with its precision applied, as in a real run. Meta stands for
the plan's device, whose facts are passed as data. Every operation is checked against `rules`, live
results are counted as memory, and work is added up (`counters`). So dtype clashes, peak memory and
the amount of work are known without the hardware, the weights or the time. Branches on values, such
as ``if mask.all()``, are answered with no. Host tensors are real and small.
Read next: `everyframe.dry_run.call`, `everyframe.core.bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from everyframe.core.errors import EveryframeError, first_line
from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.dry_run import rules
from everyframe.dry_run.call import DryRunCall
from everyframe.dry_run.counters import MAX_FINDINGS, ComponentTally, MemoryTracker, OperationCost
from everyframe.dry_run.meta_device import (
    COMPUTED,
    HOST_ELEMENTS,
    STAND_IN,
    OperationDict,
    goes_to_host,
    listed,
    made_on_device,
    on_device,
    on_host,
    operation_key,
    place,
    places,
    select_stand_ins,
    tensors_of,
    to_stand_in,
    widen,
    without_masks,
)
from everyframe.dry_run.result import FATAL, DryRunFinding, DryRunResult, DryRunResults
from everyframe.dry_run.sdpa_backend import SdpaCall, is_fused, returns_lse
from everyframe.ops.attention import attention_with_lse, plain_attention
from everyframe.ops.device import simulate_device_type
from everyframe.ops.dtypes import float32_or_wider
from everyframe.precision import cast_hooks
from everyframe.precision.dtypes import dtype_name
from everyframe.precision.islands import is_in_island
from everyframe.precision.quantization import as_quantized

#: Operations after which a dry run of foreign code is stopped.
MAX_OPERATIONS = 30_000


@dataclass(frozen=True)
class DryRunModule:
    """A module without weights, and its precision; see `cast_hooks.add_cast_hooks`."""

    module: nn.Module
    precision: Precision | None
    outputs: tuple[str, ...] = ("",)


def dry_run(
    call: DryRunCall, precisions: Mapping[str, Precision | None], device: DeviceFacts
) -> DryRunResults:
    """Dry-run a call with its components in these precisions, and return the findings for each.

    Modules have no weights and are restored afterwards, except for the dtypes of their parameters.
    A precision of None leaves a module in the dtypes it has.
    """
    call.before()
    modules = call.modules()
    parts = {
        name: DryRunModule(module, precisions[name], call.outputs(name, module))
        for name, module in modules.items()
    }
    return dry_run_modules(parts, partial(call.call, modules), device, is_foreign=call.is_foreign)


def dry_run_modules(
    parts: Mapping[str, DryRunModule],
    call: Callable[[str], object],
    device: DeviceFacts,
    *,
    is_foreign: bool = False,
) -> DryRunResults:
    """Dry-run ``call(STAND_IN)``, which uses these modules; see `dry_run`.

    Operations between modules count for the module that ran last, and each module's peak includes
    everything alive then. Code that `is_foreign` was not written for dry runs: small tensors keep
    their values, and host tensors stand for device tensors where the two meet. It may still stop
    early, where it needs other values or a real device. What it returns is stored, so it should
    hold no tensor.
    """
    precisions = {name: part.precision for name, part in parts.items()}
    run = _Run(device, precisions, is_lenient=is_foreign)
    with _prepare(parts, run):
        if not is_foreign:
            with suppress(_Failed):  # why it failed is among the findings
                call(STAND_IN)
            return DryRunResults(run.found())
        stopped, returned = "", None
        try:
            returned = call(STAND_IN)
        except _Failed as failed:
            stopped = str(failed)
        except EveryframeError:  # it can't be done, whatever the numbers would be
            raise
        except (  # whatever its code may raise, where a number is not what it would be
            ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError,
            ValueError,
        ) as error:  # fmt: skip
            message = (str(error).strip() or "without a word").splitlines()[0]
            stopped = f"{type(error).__name__}: {message}"
    found = run.found()
    if not stopped:
        return DryRunResults(found, returned=returned)
    # The error that stopped the call is reported once; a dtype clash stays a finding.
    kept = {name: each for name, each in found.items() if name != run.at or each.clashes}
    return DryRunResults({name: e for name, e in kept.items() if e.num_operations}, stopped, run.at)


@contextmanager
def _prepare(parts: Mapping[str, DryRunModule], run: _Run) -> Iterator[None]:
    """Context: modules are on the stand-in in their precisions, and every operation is recorded."""
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(as_quantized(part.module, part.precision))
            # Module.to itself: overrides of it may warn.
            nn.Module.to(part.module, STAND_IN).eval().requires_grad_(False)
            if part.precision is not None:
                casts = [cast_hooks.add_cast_hooks(part.module, part.precision, part.outputs)]
                if run.is_lenient and len(parts) > 1:  # as a pipeline's parts are put together
                    casts.append(cast_hooks.add_input_casts(part.module))
                for hooks in casts:
                    stack.callback(hooks.remove)
            stack.enter_context(_names(name, part.module, run))
        # Inference mode doesn't decompose some operations, such as `mask.all()`.
        stack.enter_context(simulate_device_type(run.device.kind))
        for each in (torch.inference_mode(False), torch.no_grad(), _Attention(run), run):
            stack.enter_context(each)
        yield


class _Failed(Exception):  # noqa: N818 - never leaves this module
    """An operation raised; the message is among the findings."""


@contextmanager
def _names(part: str, module: nn.Module, run: _Run) -> Iterator[None]:
    """Context: report to `run` the current component and module."""

    def entering(name: str) -> Callable[..., None]:
        return lambda *_: run.enter(part, name)

    def leaving(name: str) -> Callable[..., None]:
        return lambda *_: run.leave(name)

    handles = []
    for name, each in module.named_modules():
        # Before our input casts, so that these count as the module's own.
        handles.append(each.register_forward_pre_hook(entering(name), prepend=True))
        handles.append(each.register_forward_hook(leaving(name), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Attention(TorchFunctionMode):
    """Function mode: compute attention as the device does, where meta would materialise scores.

    It also handles tensors made from Python lists, for which torch dispatches no operation.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        try:
            if func is F.scaled_dot_product_attention:
                asked = SdpaCall(*args, **given)  # torch's names, however it was given them
                if asked.query.device.type == STAND_IN:
                    return self._run.attention(asked)
            if func is attention_with_lse:
                asked = SdpaCall(*args, **given)
                if asked.query.device.type == STAND_IN:
                    return self._run.attention_with_lse(asked)
            if func in (torch.tensor, torch.as_tensor) and made_on_device(given):
                # Foreign code may read the values.
                return listed(func, args, given, keeps=self._run.is_lenient)
            return func(*args, **given)
        except ValueError as error:
            # Some functions reject a size this way; foreign code may catch it.
            if self._run.is_lenient:
                raise
            self._run.fails(str(getattr(func, "__name__", func)), error)
        except RuntimeError as error:
            # Some functions compare dtypes before they call an operation.
            dtypes = {each.dtype for each in on_device((args, given)) if each.is_floating_point()}
            kind = "clash" if len(dtypes) > 1 else "fails"
            self._run.fails(str(getattr(func, "__name__", func)), error, kind)


@lru_cache(maxsize=8)
def _costs_on(device: DeviceFacts) -> OperationDict[OperationCost]:
    """Costs of operations on such a device, filled by dry runs."""
    return OperationDict()


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records every operation on the stand-in device, by component."""

    def __init__(
        self,
        device: DeviceFacts,
        precisions: Mapping[str, Precision | None],
        *,
        is_lenient: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.is_lenient, self._left = device, is_lenient, MAX_OPERATIONS
        # A CPU and its host share memory.
        self._mixes = is_lenient or device.kind == "cpu"
        self._tallies = {name: ComponentTally(precision) for name, precision in precisions.items()}
        #: The current component, or the last one.
        self.at = next(iter(self._tallies))
        self._modules: list[str] = []
        self.live = MemoryTracker()
        self._costs = _costs_on(device.kind_only())

    def enter(self, part: str, module: str) -> None:
        """Record that a module of a component is about to be called."""
        self._modules.append(module)
        if part != self.at:
            self._close()
            self.at = part
        self._now.num_passes += not module  # the component itself

    @property
    def _now(self) -> ComponentTally:
        return self._tallies[self.at]

    def leave(self, module: str) -> None:
        """Record that a module returned, if it was entered (an earlier foreign hook may raise)."""
        if self._modules[-1:] == [module]:
            self._modules.pop()

    def found(self) -> dict[str, DryRunResult]:
        """Result of each component."""
        self._close()
        return {name: tally.found() for name, tally in self._tallies.items()}

    def _close(self) -> None:
        peak, place = self.live.take_peak()
        if peak > self._now.peak:
            self._now.peak, self._now.peak_at = peak, place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        operation = func._schema.name
        everywhere = tensors_of((args, given))
        tensors = select_stand_ins(everywhere)
        if operation == "aten::_local_scalar_dense" and tensors:
            return torch.zeros((), dtype=tensors[0].dtype, device="cpu").item()
        if operation == "aten::_to_copy" and tensors and goes_to_host(given):
            # Host copies hold zeros; a large one is one expanded element, which is read-only.
            dtype, shape = given.get("dtype") or tensors[0].dtype, tensors[0].shape
            if tensors[0].numel() <= HOST_ELEMENTS:
                return torch.zeros(shape, dtype=dtype, device="cpu")
            return torch.zeros((), dtype=dtype, device="cpu").expand(shape)
        if operation == "aten::copy_" and tensors and args[0].device.type != STAND_IN:
            return args[0]
        if self.is_lenient and not tensors:
            given = place(func, args, given)
        if self.is_lenient and tensors:
            if operation == "aten::nonzero":
                return places(args[0])
            args = without_masks(operation, args)
            everywhere = tensors_of((args, given))
            tensors = select_stand_ins(everywhere)
        if tensors and self._mixes and len(tensors) < len(everywhere):
            args, given = tree_map(to_stand_in, (args, given))
            tensors = on_device((args, given))
        if not tensors and not made_on_device(given):
            return on_host(func, args, given) if self.is_lenient else func(*args, **given)
        return self._operation(func, operation, args, given, tensors)

    def _operation(
        self, func: Any, operation: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        """Record an operation with these `tensors` among its operands; returns its result."""
        self._now.num_operations += 1
        if self.is_lenient:
            self._left -= 1
        if self._left < 0:
            raise _Failed(f"it has more than {MAX_OPERATIONS} operations")
        key = operation_key(func, args, kwargs)
        cost = self._costs.get(key)
        if cost is None and (clashes := list(rules.check_operands(operation, args, self.device))):
            self._find(operation, clashes)
            args, key = widen(args), None  # to see what comes after
        self.live.add_old(tensors)
        try:
            answer = COMPUTED(key, func, args, kwargs)
        except RuntimeError as error:
            self.fails(operation, error)
        results = tensors_of(answer)
        place = self._place(operation)
        self.live.add_new(results, place)
        if func.is_view:
            return answer
        if cost is None:
            cost = OperationCost.of(func, args, tensors, results, self.device)
            if key is not None:
                self._costs[key] = cost
        self.live.workspace(cost.workspace, place)
        self._now.work.operation(cost)
        self._find(operation, cost.problems)
        self._note(operation, cost.dtypes)
        return answer

    def fails(
        self, operation: str, error: RuntimeError | ValueError, kind: str = "fails"
    ) -> NoReturn:
        """Record that an operation raised, and end the run."""
        message = first_line(error)
        self._find(operation, [(kind, message)])
        raise _Failed(f"{self._place(operation)}: {message}") from error

    def attention(self, asked: SdpaCall) -> Tensor:
        """Attention as the device computes it: by a fused kernel, or with materialised scores."""
        if clashes := list(rules.check_attention(*asked.operands, asked.attn_mask)):
            self._find("attention", clashes)
            asked = asked.in_one_dtype()  # to see what comes after
        if not is_fused(asked, self.device):
            return plain_attention(**vars(asked))  # every operation of it is seen
        return self._run_fused(asked)

    def attention_with_lse(self, asked: SdpaCall) -> tuple[Tensor, Tensor] | None:
        """As `attention`; None where the device's kernel returns no log-sum-exp."""
        if not returns_lse(asked, self.device):
            return None
        lse = asked.query.new_empty(
            asked.query.shape[:-1], dtype=float32_or_wider(asked.query.dtype)
        )
        return self._run_fused(asked), lse

    def _run_fused(self, asked: SdpaCall) -> Tensor:
        """Result of a fused kernel in that kernel's memory layout, and its cost."""
        self._now.num_operations += 1
        query, key, value = asked.operands
        batch, heads, length, _ = query.shape
        out = value.new_empty((batch, length, heads, value.shape[-1])).transpose(1, 2)
        place = self._place("attention")
        if self.device.kind == "mps":  # its scores are a tensor
            scores = batch * heads * length * key.shape[-2] * query.element_size()
            self.live.workspace(scores, place)
        self._now.work.attention(query, key, value, asked.attn_mask)
        self._find("attention", rules.check_device("attention", asked.operands, [out], self.device))
        self._note("attention", [dtype_name(each.dtype) for each in asked.operands])
        return out

    def _note(self, operation: str, dtypes: Sequence[str]) -> None:
        """Record where an operation of these floating operands was made."""
        module = self._module
        if module and is_in_island(module, self._now.islands):
            self._find(operation, rules.check_island(operation, dtypes))
        self._now.seen[module, operation, dtypes[0] if dtypes else ""] = None

    def _find(self, operation: str, problems: Any) -> None:
        for kind, problem in problems:
            if len(self._now.findings) < MAX_FINDINGS or kind in FATAL:
                short = operation.removeprefix("aten::")
                self._now.findings.append(DryRunFinding(kind, self._module, short, problem))

    @property
    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _place(self, operation: str) -> str:
        return f"{self._module or 'around the model'}: {operation.removeprefix('aten::')}"
