"""Data model of a trace: modules, their calls in order, and the tensors of each call.

Frozen data. `recorder` makes a trace; `file` stores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

Kind = Literal["weight", "input", "output"]


@dataclass(frozen=True)
class TracedModule:
    """One module.

    Attributes:
        component: the component that contains it.
        module: dotted name in the component; "" is the component itself.
        kind: class name.
    """

    component: str
    module: str
    kind: str

    @property
    def name(self) -> str:
        """Component and module, as one dotted name."""
        return f"{self.component}.{self.module}" if self.module else self.component


@dataclass(frozen=True)
class Call:
    """One call of a module.

    Attributes:
        part: index of the module.
        number: call of the outermost watched module, from 1: for a denoiser the step, or two per
            step with guidance in two calls.
        nth: call of this module within that one.
        parent: index of the enclosing call, -1 for none.
    """

    part: int
    number: int
    nth: int
    parent: int


@dataclass(frozen=True)
class TracedTensor:
    """One tensor: an input or output of a call, or a weight (recorded at the module's first call).

    Entries are in the order of recording.

    Attributes:
        call: index of the call.
        kind: weight, input or output.
        name: name within the call.
        dtype: precision of the values; a weight that was rounded and widened has the narrower
            dtype.
        shape: shape of the tensor.
        row: row of its fingerprint in `Trace.numbers`.
    """

    call: int
    kind: Kind
    name: str
    dtype: str
    shape: tuple[int, ...]
    row: int


@dataclass(frozen=True)
class Trace:
    """A complete recording.

    Attributes:
        same: facts that must match between two compared traces (model, sizes, seed, ...).
        about: facts that may differ and are reported (device, precision, versions).
        parts: modules.
        calls: calls, in order.
        seen: tensors, in order.
        numbers: fingerprints (rows, `NUM_NUMBERS`).
        ended: why the run ended early; empty if it did not.
        full: whole tensors, by index in `seen`.
        arguments: argument structure of each fully recorded call, by index in `calls`; see
            `replay`.
    """

    same: Mapping[str, str]
    about: Mapping[str, str]
    parts: tuple[TracedModule, ...]
    calls: tuple[Call, ...]
    seen: tuple[TracedTensor, ...]
    numbers: npt.NDArray[np.floating[Any]] = field(repr=False)
    ended: str = ""
    full: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    arguments: Mapping[int, Any] = field(default_factory=dict, repr=False)

    def place(self, call: int) -> str:
        """Short name of a call: ``denoiser.blocks.3.attn, call 2``."""
        made = self.calls[call]
        again = f" (time {made.nth})" if made.nth > 1 else ""
        return f"{self.parts[made.part].name}, call {made.number}{again}"
