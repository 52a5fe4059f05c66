"""Changes to diffusers and transformers that other threads could see: all of them, under one lock.

The libraries leave no other way: their log level and progress bars are process-wide, and their code
looks up in its own module what needs a real device, or draws noise. Names are replaced in *their*
modules, never in torch, and only while a call of ours needs it: the last one restores them. For
other threads a replacement does what the original does. Apart from this, a run changes only its own
objects, torch's switches (`everyframe.hardware.switches`) and seeds (`global_generators.py`).
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor

from everyframe.core.events import Event
from everyframe.dry_run.meta_device import STAND_IN
from everyframe.ops.attention import plain_attention
from everyframe.ops.device import meta_device_type

#: Held while anything is replaced or restored, also while a forgotten stream is collected.
_LOCK = threading.RLock()


class _Patch:
    """A replacement that is in place while at least one call uses it, in any thread.

    `install` replaces, and returns a function that restores.
    """

    def __init__(self, install: Callable[[], Callable[[], object]]) -> None:
        self._install = install
        self._restore: Callable[[], object] = install
        self._num_users = 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context: the replacement is in place."""
        with _LOCK:
            if not self._num_users:
                self._restore = self._install()
            self._num_users += 1
        try:
            yield
        finally:
            with _LOCK:
                self._num_users -= 1
                if not self._num_users:
                    self._restore()


def _replace(namespace: dict[Any, Any], new: dict[Any, Any]) -> Callable[[], None]:
    """Replace items; returns a function that restores those which are still ours."""
    before = {name: namespace[name] for name in new}
    namespace.update(new)

    def restore() -> None:
        namespace.update({k: v for k, v in before.items() if namespace.get(k) is new[k]})

    return restore


@contextmanager
def quiet_libraries(*, even_errors: bool = False) -> Iterator[None]:
    """Context: diffusers and transformers draw no bars and log errors only.

    With `even_errors` they log critical messages only: for attempts that may fail and whose failure
    is reported in our own words.
    """
    _QUIET.enter(even_errors=even_errors)
    try:
        yield
    finally:
        _QUIET.leave(even_errors=even_errors)


def quietly(events: Iterator[Event]) -> Iterator[Event]:
    """Yield the same events, each produced in `quiet_libraries`; the consumer is not silenced."""
    while True:
        with quiet_libraries():
            event = next(events, None)
        if event is None:
            return
        yield event


#: Where diffusers logs what a block of a modular pipeline raises.
_BLOCK_LOGGER = "diffusers.modular_pipelines.modular_pipeline"


def _is_no_error(record: logging.LogRecord) -> bool:
    """Whether the record is about something else than an error that is being raised."""
    return sys.exc_info()[0] is None


def _silence_blocks() -> Callable[[], None]:
    logger = logging.getLogger(_BLOCK_LOGGER)
    logger.addFilter(_is_no_error)
    return partial(logger.removeFilter, _is_no_error)


#: Modular pipelines don't log an error that is being raised.
QUIET_BLOCKS = _Patch(_silence_blocks)


class _Quiet:
    """Process-wide log level of the libraries: the first user saves it, the last restores it."""

    def __init__(self) -> None:
        self._entered = {False: 0, True: 0}
        self._before: list[tuple[Any, int, bool]] = []

    def enter(self, *, even_errors: bool) -> None:
        """Lower the log level for one more user."""
        with _LOCK:
            if not any(self._entered.values()):
                self._before = [
                    (library, library.get_verbosity(), library.is_progress_bar_enabled())
                    for library in _libraries()
                ]
            self._entered[even_errors] += 1
            self._set()

    def leave(self, *, even_errors: bool) -> None:
        """Remove one user: keep the level that others still need, or restore the original one."""
        with _LOCK:
            self._entered[even_errors] -= 1
            self._set()

    def _set(self) -> None:
        is_quiet = any(self._entered.values())
        for library, verbosity, has_bars in self._before:
            quiet = library.CRITICAL if self._entered[True] else library.ERROR
            wanted = quiet if is_quiet else verbosity
            if library.get_verbosity() != wanted:  # each change makes every logger look again
                library.set_verbosity(wanted)
            if is_quiet:
                library.disable_progress_bar()
            elif has_bars:
                library.enable_progress_bar()


_QUIET = _Quiet()


def _libraries() -> tuple[Any, ...]:
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    return of_diffusers, of_transformers


_NAME = "randn_tensor"
_IS_OURS: ContextVar[bool] = ContextVar("is_ours", default=False)


class _Drawn:
    """Replacement of diffusers' `randn_tensor`: draws in float32 if the call is ours."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        asked = self._signature.bind(*args, **kwargs).arguments
        dtype = asked.get("dtype")
        if not _IS_OURS.get() or dtype not in (torch.bfloat16, torch.float16):
            return self.original(**asked)
        return self.original(**{**asked, "dtype": torch.float32}).to(dtype)


def _replace_noise() -> Callable[[], None]:
    from diffusers.utils import torch_utils

    drawn = _Drawn(torch_utils.randn_tensor)
    _replace_everywhere(drawn.original, drawn)
    return partial(_replace_everywhere, drawn, drawn.original)


def _replace_everywhere(old: object, new: object) -> None:
    """Replace the function in every module that imported it, also outside diffusers."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(_NAME) is old:
            names[_NAME] = new


_NOISE = _Patch(_replace_noise)


@contextmanager
def float32_noise() -> Iterator[None]:
    """Context, for this thread: bfloat16 and float16 noise is drawn in float32 and rounded."""
    with _NOISE.used():
        token = _IS_OURS.set(True)
        try:
            yield
        finally:
            _IS_OURS.reset(token)


#: What hears the steps of a scheduler in this context, with that scheduler.
_LISTENER: ContextVar[tuple[Any, Callable[[Any, Mapping[str, Any]], None]] | None] = ContextVar(
    "listener", default=None
)


def _heard_step(owner: type) -> Callable[[], None]:
    """Let ``step`` of a scheduler's class tell what it was given; returns what restores it."""
    original = vars(owner)["step"]
    signature = inspect.signature(original)

    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        scheduler, hear = _LISTENER.get() or (None, None)
        if hear is not None and scheduler is self:
            hear(self, signature.bind(self, *args, **kwargs).arguments)
        return result

    type.__setattr__(owner, "step", step)

    def restore() -> None:
        if vars(owner)["step"] is step:
            type.__setattr__(owner, "step", original)

    return restore


@cache
def _of_scheduler(owner: type) -> _Patch:
    return _Patch(partial(_heard_step, owner))


@contextmanager
def steps_heard(scheduler: Any, hear: Callable[[Any, Mapping[str, Any]], None]) -> Iterator[None]:
    """Context, for this thread: ``hear(scheduler, arguments)`` after each step of that scheduler.

    Its class is changed and not the object, of which pipelines make copies.
    """
    owner = next((each for each in type(scheduler).__mro__ if "step" in vars(each)), None)
    if owner is None:
        yield
        return
    with _of_scheduler(owner).used():
        token = _LISTENER.set((scheduler, hear))
        try:
            yield
        finally:
            _LISTENER.reset(token)


class _Seam(ModuleType):
    """A module as one library module sees it: with a few names replaced."""

    def __init__(self, module: ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self._module = module
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Generators(type):
    """Metaclass: `isinstance` accepts every `torch.Generator`."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Generator)


class _Generator(metaclass=_Generators):
    """Makes a generator for a device; on the CPU for the stand-in device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch.Generator("cpu" if torch.device(device).type == STAND_IN else device)


def _casts(device_type: str, *args: Any, **kwargs: Any) -> Any:
    """Mochi and others disable a caller's casts around positions; the stand-in device has none."""
    own: Any = vars(torch)["autocast"]
    return nullcontext() if device_type == STAND_IN else own(device_type, *args, **kwargs)


def _attends(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Flex attention, as in LTX-2.5: it sees some of the keys, but uncompiled writes all scores."""
    if query.device.type == STAND_IN:
        return plain_attention(query, key, value)
    return flex.flex_attention(query, key, value, *args, **kwargs)


class _Lacking(frozenset[str]):
    """Devices that lack a dtype; in a dry run also the stand-in, where it stands for one of them.

    So does the CPU there, on which small tensors keep their values. Otherwise a dry run would meet
    float64 where the real run does not.
    """

    def __contains__(self, kind: object) -> bool:
        has = super().__contains__
        return has(kind) or (kind in (STAND_IN, "cpu") and has(meta_device_type()))


def _replace_names(module: str) -> Callable[[], None]:
    """Let one module of a library use the stand-in device."""
    names, new = vars(sys.modules[module]), {}
    for name, value in names.items():
        if value is torch:
            new[name] = _Seam(torch, {"autocast": _casts, "Generator": _Generator})
        elif value is flex:
            new[name] = _Seam(flex, {"flex_attention": _attends})
    return _replace(names, new)


@cache
def _of_module(name: str) -> _Patch:
    return _Patch(partial(_replace_names, name))


def _replace_dtypes() -> Callable[[], None]:
    from diffusers.utils import torch_utils

    table = torch_utils._DTYPE_UNSUPPORTED_DEVICES
    return _replace(table, {dtype: _Lacking(kinds) for dtype, kinds in table.items()})


_DTYPES = _Patch(_replace_dtypes)
_DISPATCH = "diffusers.models.attention_dispatch"


@contextmanager
def stand_in_accepted(owners: Iterable[object]) -> Iterator[None]:
    """Context: the code of these objects' classes runs on the stand-in device.

    Only the modules in which the classes are defined are changed.
    """
    classes = {base for owner in owners for base in type(owner).__mro__}
    names = {each.__module__ for each in classes if not _is_torchs(each)}
    with ExitStack() as stack:
        stack.enter_context(_DTYPES.used())
        for name in sorted((names | {_DISPATCH}) & sys.modules.keys()):
            stack.enter_context(_of_module(name).used())
        yield


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "everyframe")
