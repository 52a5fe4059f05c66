"""A compiled block: a package for each kind of call, held against the block as it is written.

Stands in place of the block's call (`nn.Module._compiled_call_impl`), so names, parameters and
hooks stay. A package is used if it was certified: right, and faster than the block as written,
which is tried on the first call's own inputs. Its first result at each size in a process is
compared as well. Whatever a package can't compute (gradients, a hook inside, tensors that are
watched) runs as written.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from everyframe.fast_paths.benchmark import relative_error
from everyframe.fast_paths.compilation import package_store
from everyframe.fast_paths.compilation.block_export import (
    CallSizes,
    compile_block,
    first_line,
    format_of,
)
from everyframe.fast_paths.compilation.block_state import (
    BlockState,
    NotCompilableError,
    describe,
    flatten,
    layout_of,
    only_watches,
)
from everyframe.fast_paths.compilation.block_trial import (
    Given,
    call_with_hooks,
    changes_state,
    try_block,
)
from everyframe.fast_paths.compilation.loaded_package import LoadedPackage
from everyframe.fast_paths.compilation.package_store import Package, machine
from everyframe.fast_paths.compilation.process_settings import read_settings
from everyframe.fast_paths.compilation.source_digest import digest
from everyframe.fast_paths.modules.convolution_modules import move_weights
from everyframe.hardware.thread_state import computes_plainly
from everyframe.precision.cast_hooks import map_tensors
from everyframe.precision.plain_tensors import is_plain

_log = logging.getLogger(__name__)

#: Packages of a block between two changes of it, those that were refused among them, and changes
#: for which there are packages. Others (a number that is another in every call) run as written.
_MOST = 8
_CHANGED = "it was changed too often, as by an adapter's scale; everyframe.compile it again"

_LOCK = threading.RLock()

#: Warnings of this process.
_LOGGED: set[str] = set()


#: Why calls run as written that torch.compile failed on; and such reasons of this process, by the
#: key of a kind of call. They are not stored: a compiler that lacks something may have it later.
FAILS = "torch.compile fails: "
_FAILED: dict[str, str] = {}

#: Loaded packages by (digest, device): equal blocks share one.
_LOADED: dict[tuple[str, torch.device], LoadedPackage] = {}

#: What was compared with the block as written: (digest, device, *arguments).
_CHECKED: set[tuple[Any, ...]] = set()


@dataclass
class BlockReport:
    """What became of the calls of a block.

    Attributes:
        packages: in use, by digest.
        notes: why some calls ran as written, and how many.
    """

    packages: dict[str, Package] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)


Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]


@dataclass(frozen=True)
class _Call:
    """A call of a block: its arguments, the block's own tensors and those of the arguments."""

    block: nn.Module
    given: Given
    weights: list[Tensor]
    tensors: list[Tensor]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def all_tensors(self) -> list[Tensor]:
        """The inputs of a package."""
        return [*self.weights, *self.tensors]


class CompiledBlock:
    """Calls a block by its packages where they are certified.

    Args:
        block: the block.
        dynamic: compile for varying sizes where that can be done.
        compiles: compile what has no package yet; otherwise it runs as written.
        warns: log why calls run as written; `report` has it in any case.
        fallback: makes a compiled function of the block's `forward` where it can't be exported.
    """

    def __init__(
        self,
        block: nn.Module,
        *,
        dynamic: bool,
        compiles: bool,
        warns: bool,
        fallback: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._block = weakref.ref(block)  # which holds this
        self._dynamic, self._compiles, self._warns = dynamic, compiles, warns
        self._fallback = fallback
        self._state = BlockState()
        self._runs: dict[Any, Run | str] = {}  # or why a package was refused
        # Digests of packages that were compiled or found, by the state that they are for.
        self._ways: dict[str, set[str]] = {}
        self.report = BlockReport()

    @property
    def is_compiled(self) -> bool:
        """Whether any call was computed by compiled code."""
        return any(map(callable, self._runs.values()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block()
        assert block is not None, "it is being called"
        as_written: Any = block._call_impl
        if _has_changing_hooks() or block._backward_hooks:
            return as_written(*args, **kwargs)
        for watch in tuple(global_hooks._global_forward_pre_hooks.values()):
            watch(block, args)
        if not block._forward_pre_hooks and not block._forward_hooks:
            return self._compute(block, args, kwargs)
        return call_with_hooks(block, partial(self._compute, block), args, kwargs)

    def _compute(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[Tensor] = []
        key: tuple[Any, ...] = ()
        try:
            if torch.is_grad_enabled():
                raise NotCompilableError("gradients are on (torch.no_grad turns them off)")
            if not computes_plainly():
                raise NotCompilableError("")
            weights = self._weights(block)
            structure = flatten((args, kwargs), tensors)
            key = (self._state.key, read_settings(), structure, *map(_form, tensors))
            if key not in self._runs:
                call = _Call(block, (args, kwargs), weights, tensors)
                self._runs[key] = self._choose_run(call, key)
            run = self._runs[key]
            if not isinstance(run, str):
                return run(weights, tensors)
            self._note(block, run)
        except NotCompilableError as error:
            self._runs.pop(key, None)
            self._note(block, str(error))
        return block.forward(*args, **kwargs)

    def _note(self, block: nn.Module, why: str) -> None:
        if not why:
            return
        self.report.notes[why] += 1
        message = f"{type(block).__name__} runs as written: {why}"
        if self._warns and message not in _LOGGED:
            _LOGGED.add(message)  # once for all equal blocks
            _log.warning("%s", message)

    def _weights(self, block: nn.Module) -> list[Tensor]:
        """Parameters and buffers as they are now; describes the block again if it has changed."""
        state = self._state
        found = [held.get(key) for held, keys in state.places for key in keys]
        if (
            state.watch is None
            or not state.watch.is_unchanged()
            or any(len(held) != len(keys) for held, keys in state.places)
            or [each if each is None else layout_of(each) for each in found] != state.layouts
            or any(found[one] is not found[other] for one, other in state.twins)
        ):
            move_weights(block)
            state = self._state = describe(block)
            found = [held.get(key) for held, keys in state.places for key in keys]
        if state.why_not:
            raise NotCompilableError(state.why_not)
        return [found[number] for number in state.first]  # type: ignore[misc]

    def _choose_run(self, call: _Call, key: tuple[Any, ...]) -> Run | str:
        """How calls like this one are computed; as written for good, for a reason.

        Raises:
            NotCompilableError: this one is computed as written, for this reason.
        """
        tensors = call.tensors
        if not tensors or any(not is_plain(each) or each.is_meta for each in tensors):
            raise NotCompilableError("its arguments are no plain tensors")
        # With the kinds of arguments, without their sizes: those are the packages' conditions.
        kinds = [(each.dtype, each.device.type, each.ndim, format_of(each)) for each in tensors]
        device = call.device
        if any(each.device != device for each in call.all_tensors):
            raise NotCompilableError("its weights come to the device one by one")
        name = digest((*key[:3], tuple(kinds), machine(device)))
        with _LOCK:
            if name in _FAILED:
                return _FAILED[name]
            package = self._find(name, call)
            if package is None:
                return self._make(call, name)
            self._count(package)
            if package.verdict == "refused":
                return package.reason
            if not package.library:
                return self._compile_by_torch(call, name)
            loaded = _LOADED[package.digest, device]
        checked = (package.digest, device, *map(_form, tensors))
        if checked not in _CHECKED:
            self._check(loaded, call)
            _CHECKED.add(checked)
        self.report.packages[package.digest] = package
        return loaded.run

    def _check(self, loaded: LoadedPackage, call: _Call) -> None:
        """Compare a package with a block as written, once for all equal ones of this process."""
        # Copies of the arguments, as blocks may write to theirs.
        own, named = map_tensors(call.given, Tensor.clone)
        got = loaded.run(call.weights, [each.clone() for each in call.tensors])
        error = relative_error(got, call.block.forward(*own, **named))
        if not error <= 3 * loaded.package.limit + 1e-4:
            raise NotCompilableError(f"its package is off by {error:.1e} from the block as written")

    def _find(self, name: str, call: _Call) -> Package | None:
        for package in package_store.find(name):
            if not package.sizes.fit(call.all_tensors):
                continue
            if package.verdict == "refused" or not package.library:
                return package
            known = (package.digest, call.device)
            library = None if known in _LOADED else package_store.library_of(package)
            if library is not None:
                _LOADED[known] = LoadedPackage(package, library, call.device)
            if known in _LOADED:
                return package
        return None

    def _make(self, call: _Call, name: str) -> Run:
        """Compile a package for this call and try it on its inputs."""
        if not self._compiles:
            raise NotCompilableError("it isn't compiled yet (`everyframe compile` does it)")
        ways = self._ways.get(self._state.key, ())
        if len(ways) >= _MOST:
            raise NotCompilableError(f"it is called in more than {_MOST} ways")
        if not ways and len(self._ways) >= _MOST:
            raise NotCompilableError(_CHANGED)
        if changes_state(call.block, call.given):
            why = "its calls change its attributes, or the lists that they are given"
            self._keep(replace(_draft(call, name, _all_sizes(call), 0.0), reason=why))
            raise NotCompilableError(why)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="everyframe-") as folder:
            try:
                if not all(map(is_plain, call.weights)):
                    raise NotCompilableError("its weights are no plain tensors")
                made = compile_block(call.block, *call.given, Path(folder), dynamic=self._dynamic)
            except NotCompilableError as error:
                return self._try_torch_compile(call, name, str(error))
            draft = replace(
                _draft(call, name, made.sizes, time.perf_counter() - began),
                result=made.result, library=package_store.digest_of(made.library),
            )  # fmt: skip
            package = _try(draft, call, LoadedPackage(draft, made.library, call.device).run)
            self._keep(package, made.library)
        if package.verdict == "refused":
            raise NotCompilableError(package.reason)
        library = package_store.library_of(package)
        assert library is not None, "it was written just now"
        loaded = _LOADED[package.digest, call.device] = LoadedPackage(package, library, call.device)
        self.report.packages[package.digest] = package
        return loaded.run

    def _keep(self, package: Package, library: Path | None = None) -> None:
        package_store.keep(package, library)
        self._count(package)

    def _count(self, package: Package) -> None:
        self._ways.setdefault(self._state.key, set()).add(package.digest)

    def _try_torch_compile(self, call: _Call, name: str, why: str) -> Run:
        """`torch.compile` of a block that can't be exported, if it is right and faster.

        The verdict is kept like a package, without a library and for all sizes: the next block of
        the kind, and the next process, neither export nor try it again.
        """
        self._note(call.block, f"no package ({why}); torch.compile instead")
        run = self._compile_by_torch(call, name)
        package = _try(_draft(call, name, _all_sizes(call), 0.0), call, run)
        if package.verdict == "refused":
            package = replace(package, reason=f"torch.compile: {package.reason} ({why})")
        self._keep(package)
        if package.verdict == "refused":
            raise NotCompilableError(package.reason)
        return run

    def _compile_by_torch(self, call: _Call, name: str) -> Run:
        """The block by torch.compile, which compiles in a call; its guards notice changes."""
        from torch._dynamo.exc import BackendCompilerFailed  # takes a second

        compiled = self._fallback(call.block.forward)
        # The structure alone: this call's tensors would stay in memory with the block.
        given = map_tensors(call.given, lambda _: torch.empty(0))

        def run(_: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
            rest = iter(tensors)
            args, kwargs = map_tensors(given, lambda _: next(rest))
            if name in _FAILED:  # for an equal block
                raise NotCompilableError(_FAILED[name])
            try:
                return compiled(*args, **kwargs)
            except BackendCompilerFailed as error:
                _FAILED[name] = f"{FAILS}{first_line(error.inner_exception)}"
                raise NotCompilableError(_FAILED[name]) from error

        return run


def _has_changing_hooks() -> bool:
    """Whether hooks of all modules may change what a block computes.

    One that only watches is called for the block as a whole: what is inside is compiled.
    """
    has_any: Any = global_hooks._has_any_global_hook
    if not has_any():
        return False
    others: tuple[Any, ...] = (
        global_hooks._global_forward_hooks, global_hooks._global_backward_hooks,
        global_hooks._global_backward_pre_hooks,
    )  # fmt: skip
    before: Any = global_hooks._global_forward_pre_hooks
    return any(others) or not all(map(only_watches, before.values()))


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, format_of(tensor)


def _all_sizes(call: _Call) -> CallSizes:
    return CallSizes(tuple(((0, None),) * each.ndim for each in call.all_tensors))


def _draft(call: _Call, name: str, sizes: CallSizes, seconds: float) -> Package:
    """Description of a package that was not tried yet, without a library."""
    kind = type(call.block)
    return Package(
        key=name, block=f"{kind.__module__}.{kind.__qualname__}", device=machine(call.device),
        sizes=sizes, result=None, library="", verdict="refused", reason="not tried",
        error=0.0, limit=0.0, gain=0.0, seconds=round(seconds, 1),
    )  # fmt: skip


def _try(draft: Package, call: _Call, run: Run) -> Package:
    """The description with the verdict on `run` in this call."""

    def fast(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        flatten((args, kwargs), tensors)
        return run(call.weights, tensors)

    return replace(draft, **vars(try_block(call.block, call.given, fast, call.device)))
