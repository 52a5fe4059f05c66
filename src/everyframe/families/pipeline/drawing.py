"""Noise of a pipeline's call, drawn in float32: one seed begins one video in every precision.

A pipeline draws its noise in the dtype that it computes in, and there torch's generator for CPUs
gives other numbers: before 2.13 it forms bfloat16's and float16's normals with the few digits of
that dtype (pytorch/pytorch#166853, huggingface/diffusers#11056), later on the last ones of an odd
length. Here they are drawn in float32 and rounded. All of diffusers draws by one function, which
its modules import by name; so it is replaced by that name, and acts in calls of ours alone.
Not here: the noise of our own families (`everyframe.samplers.noise`). Read next: `stages.py`.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_NAME = "randn_tensor"
_IS_OURS: ContextVar[bool] = ContextVar("is_ours", default=False)


class _Drawn:
    """diffusers' function, which draws in float32 where the call is ours."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        asked = self._signature.bind(*args, **kwargs).arguments
        dtype = asked.get("dtype")
        if not _IS_OURS.get() or dtype not in (torch.bfloat16, torch.float16):
            return self.original(**asked)
        return self.original(**{**asked, "dtype": torch.float32}).to(dtype)


class _Place:
    """Holds the function in its place while any call of ours is under way, in any thread."""

    def __init__(self) -> None:
        self._lock, self._num_calls = threading.Lock(), 0
        self._drawn: _Drawn | None = None

    def enter(self) -> None:
        from diffusers.utils import torch_utils

        with self._lock:
            self._num_calls += 1
            if self._drawn is None:
                self._drawn = _Drawn(torch_utils.randn_tensor)
                _replace(self._drawn.original, self._drawn)

    def leave(self) -> None:
        with self._lock:
            self._num_calls -= 1
            if not self._num_calls and self._drawn is not None:
                _replace(self._drawn, self._drawn.original)
                self._drawn = None


_PLACE = _Place()


@contextmanager
def in_float32() -> Iterator[None]:
    """Within, in this thread, noise in bfloat16 and float16 is float32's, rounded."""
    _PLACE.enter()
    token = _IS_OURS.set(True)
    try:
        yield
    finally:
        _IS_OURS.reset(token)
        _PLACE.leave()


def _replace(old: object, new: object) -> None:
    """In every module that has imported it, a pipeline's own outside of diffusers as well."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(_NAME) is old:
            names[_NAME] = new
