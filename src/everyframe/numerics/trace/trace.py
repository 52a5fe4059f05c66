"""A trace as a value: which modules were called in which order, and what was seen of each call.

Frozen data, and the words that the other modules of this folder share. Read next: `recording`,
which makes one; `file`, which keeps one.
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
class Part:
    """One module: the component that it is in, its dotted name there ("" is all), its class."""

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

    `number` counts, from 1, the calls of the outermost module around it that is watched: for a
    denoiser the steps, or twice as many where guidance asks twice. `nth` counts the calls of this
    module in that one. `parent` is the call that it was made in, by its place, -1 for none.
    """

    part: int
    number: int
    nth: int
    parent: int


@dataclass(frozen=True)
class Seen:
    """One tensor that a call was given or gave, or that the module holds (at its first call).

    `dtype` says how exact its numbers are: a weight that was rounded and widened again has the
    narrower one. `row` is where its fingerprint lies. In the order in which they were seen.
    """

    call: int
    kind: Kind
    name: str
    dtype: str
    shape: tuple[int, ...]
    row: int


@dataclass(frozen=True)
class Trace:
    """All of a recording.

    `same` has to be the same in two traces that are compared (model, sizes, seed, …), `about` may
    differ and is told (device, precision, versions). `ended` is why the run ended early, if so.
    `full` holds whole tensors by place in `seen`, and `arguments` how each recorded call's were
    arranged, by place in `calls` (see `replay`).
    """

    same: Mapping[str, str]
    about: Mapping[str, str]
    parts: tuple[Part, ...]
    calls: tuple[Call, ...]
    seen: tuple[Seen, ...]
    numbers: npt.NDArray[np.floating[Any]] = field(repr=False)
    ended: str = ""
    full: Mapping[int, Tensor] = field(default_factory=dict, repr=False)
    arguments: Mapping[int, Any] = field(default_factory=dict, repr=False)

    def place(self, call: int) -> str:
        """A call in a few words: ``denoiser.blocks.3.attn, call 2``."""
        made = self.calls[call]
        again = f" (time {made.nth})" if made.nth > 1 else ""
        return f"{self.parts[made.part].name}, call {made.number}{again}"
