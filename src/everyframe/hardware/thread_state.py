"""Copy torch's per-thread state from one thread to another.

A pipeline's call then computes in a new thread as it would in its caller's. This is the only module
that handles autocast: a caller's is carried over, or turned off where a model of ours computes.
Process-wide switches are in `switches.py`. State that torch does not expose (a profiler's records,
saved-tensor hooks) and `threading.local` data of others is not copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.overrides
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from everyframe.hardware.cpu import cpu_threads

_MODES: Any = torch.overrides


@dataclass(frozen=True)
class ThreadState:
    """CPU threads, gradient mode, autocast, torch modes, current GPU and streams of one thread.

    `casts` holds (device type, autocast on, its dtype) for each device type. `streams` are those
    other than a GPU's default one: selecting a stream selects its GPU, which creates a context of
    hundreds of MB there.
    """

    num_threads: int
    has_gradients: bool
    is_inference: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]
    keeps_casts: bool
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    card: int | None
    streams: tuple[Any, ...]

    @classmethod
    def here(cls) -> ThreadState:
        card = current_card()
        cards = () if card is None else range(torch.cuda.device_count())
        return cls(
            num_threads=torch.get_num_threads(),
            has_gradients=torch.is_grad_enabled(),
            is_inference=torch.is_inference_mode_enabled(),
            casts=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in _kinds()
            ),
            keeps_casts=torch.is_autocast_cache_enabled(),
            function_modes=tuple(_MODES._get_current_function_mode_stack()),
            dispatch_modes=tuple(_get_current_dispatch_mode_stack()),
            card=card,
            streams=tuple(
                stream
                for number in cards
                if (stream := torch.cuda.current_stream(number))
                != torch.cuda.default_stream(number)
            ),
        )

    @property
    def casts_to(self) -> tuple[tuple[str, str], ...]:
        """(device type, dtype) for each device type with autocast on."""
        return tuple(
            (kind, str(dtype).removeprefix("torch.")) for kind, is_on, dtype in self.casts if is_on
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context: apply the state to this thread, a new one that ends with the block."""
        for kind, is_on, dtype in self.casts:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.keeps_casts)
        if self.casts_to:
            # As inside an autocast block: an inner block's end must not clear the cache.
            torch.autocast_increment_nesting()
        for stream in self.streams:
            torch.cuda.set_stream(stream)
        use_card(self.card)
        for mode in self.function_modes:
            _MODES._push_mode(mode)
        for mode in self.dispatch_modes:
            _push_dispatch_mode(mode)
        with (
            cpu_threads(self.num_threads),
            torch.inference_mode(self.is_inference),
            torch.set_grad_enabled(self.has_gradients),
        ):
            yield


@contextmanager
def without_default_device() -> Iterator[None]:
    """Context: what is made without a device is on the CPU, whatever the caller's default is.

    Planning and runs name the device of what is not, and draw noise on the CPU.
    """
    # A mode slows down every torch call, so it is entered only if needed.
    is_needed = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if is_needed else nullcontext():
        yield


def current_card() -> int | None:
    """Current GPU of this thread; None if torch has initialised none."""
    cuda: Any = torch.cuda
    has_cards = cuda.is_available() and cuda.is_initialized()
    return torch.cuda.current_device() if has_cards else None


def use_card(card: int | None) -> None:
    """Make a GPU the current one of this thread; a new thread begins with the first."""
    if card is not None:
        torch.cuda.set_device(card)


def without_casts() -> AbstractContextManager[Any]:
    """Context: disable autocast in this thread."""
    context: AbstractContextManager[Any] = torch._C._DisableAutocast()
    return context


def has_casts() -> bool:
    """Whether autocast is on in this thread, for any device."""
    return torch._C._is_any_autocast_enabled()


def _kinds() -> list[str]:
    known: list[str] = torch._C._autocast_supported_devices()
    return [kind for kind in known if torch.amp.is_autocast_available(kind)]


def computes_plainly() -> bool:
    """Whether this thread computes tensors by torch's kernels alone: no autocast, gradients, modes.

    Compiled code can't be watched, and knows none of them.
    """
    peek: Any = torch._C._functorch.peek_interpreter_stack
    return not (
        torch.is_grad_enabled()
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or peek() is not None
        or torch.compiler.is_compiling()
    )
