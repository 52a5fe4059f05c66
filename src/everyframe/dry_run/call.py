"""A call of a stage, as a value: what a dry run and a trial of fast paths run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class DryRunCall:
    """One call of a stage, of which one component is looked at.

    Attributes:
        component: the component that is looked at.
        components: all components of the call.
        modules: builds them on meta, by name; may return shared modules again.
        call: ``call(modules, device)`` does one step of the stage on `device`, with what surrounds
            the model (guidance, a sampler step) and every tensor that the stage has there.
        num_calls: how often the stage does that for one video.
        key: calls with equal keys have equal results.
        outputs: ``outputs(name, module)`` are a component's outputs, as in
            `precision.cast_hooks.add_cast_hooks`.
        denoises: whether it is a denoising step, whose work several ranks share.
        is_foreign: whether code runs in it that was not written for dry runs, and may not be
            followed to its end.
        model: identifies the model of such code alone, independent of the request.
        files: state of all files that such code reads; empty if results can't be saved for later
            processes, as those of code that is neither ours nor diffusers'.
        before: finds what `call` needs to know from dry runs of its own; none can begin inside it.
    """

    stage: str
    component: str
    components: tuple[str, ...]
    modules: Callable[[], Mapping[str, Any]]
    call: Callable[[Mapping[str, Any], str], object]
    num_calls: float
    key: Hashable
    outputs: Callable[[str, Any], tuple[str, ...]]
    denoises: bool = False
    is_foreign: bool = False
    model: Hashable = None
    files: tuple[Hashable, ...] = ()
    before: Callable[[], object] = _nothing

    def module(self) -> Any:
        """The module of the component that is looked at."""
        return self.modules()[self.component]
