"""A pipeline that is called again gets the answers that its denoisers gave before.

So a run that was broken off goes on where it was, though the pipeline's own loop always begins at
its first step: everything around the denoisers is computed anew, with the same generator and the
same scheduler, and costs next to nothing. Their `__call__` is another one meanwhile, by a class
made for it: a hook can't keep a module from being computed. On leaving they are as they were.
Read next: `stages.py`; `everyframe.runs.answers`, where the answers lie.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from everyframe.families.family import Take
from everyframe.families.pipeline.watching import StepWatch, seen_before


class Replaying:
    """Serves and keeps the answers of these denoisers, by name, while it is entered.

    `watch` is told of the calls that are served, and which are repeated to repair them.
    """

    def __init__(self, denoisers: Mapping[str, nn.Module], watch: StepWatch, take: Take) -> None:
        # What a cache holds of earlier calls is in the module and not in its answers.
        has_cache = any(getattr(part, "is_cache_enabled", False) for part in denoisers.values())
        self._denoisers = {} if take.answers is None or has_cache else dict(denoisers)
        self._watch = watch
        self._take = take
        self._classes: dict[str, type[nn.Module]] = {}

    def __enter__(self) -> Replaying:
        answers = self._take.answers
        if self._denoisers and answers is not None:
            self._take.remedies = answers.remedies()
        for name, module in self._denoisers.items():
            self._classes[name] = type(module)
            # Somebody else's class is left alone: this module is of a kind of its own for a while.
            module.__class__ = self._kind(name, module)
        return self

    def __exit__(self, *_: object) -> None:
        for name, kind in self._classes.items():
            self._denoisers[name].__class__ = kind
        self._classes.clear()

    def _kind(self, name: str, module: nn.Module) -> type[nn.Module]:
        """The module's class, whose calls are served while there are answers."""
        base, watch, take = type(module), self._watch, self._take
        signature = inspect.signature(module.forward)
        answers = take.answers
        assert answers is not None

        def call(own: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if watch.is_paused:
                return base.__call__(own, *args, **kwargs)
            answer = answers.next()
            if answer is not None:
                seen_before(watch, name, signature, args, kwargs)
                return answer
            answer = base.__call__(own, *args, **kwargs)
            answers.keep(answer, take.remedies)
            return answer

        return type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})
