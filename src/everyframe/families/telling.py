"""What a guard tells of a stage's calls, and its words: of a fault, of a prompt that was cut.

Not here: what is found and done (`guarding.py`, `reliefs.py`), and who reads it
(`everyframe.core.events`). Read next: `guarding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from everyframe.core.events import Event, Note
from everyframe.core.facts import DeviceFacts
from everyframe.hardware.peak import memory_verdict
from everyframe.numerics.locate import Fault, bad_weights
from everyframe.precision.dtypes import dtype_name

#: Words of a prompt that ask for frames of one colour, and which that is: values in 0..1.
_ASKS_FOR = {
    r"black|dark|darkness|night|fades?|fading": (0.0, 0.1),
    r"white|fades?|fading": (0.9, 1.0),
}

_CAUSES: dict[str, str] = {
    "range": "in float32 it is {wide}, and {dtype} ends at {limit:.0f}",
    "kernel": "in float32 it is {wide}, which fits into {dtype}: the kernel is wrong, or "
    "adds up too narrowly",
    "formula": "the same operation is not finite in float32 either",
    "lost": "the operation alone is not finite in float32 either, the module is: {dtype} lost "
    "something before it",
    "compiled": "as it is written, it is {wide}: what was compiled of it is wrong",
    "unclear": "this kernel has no float32 form to compare with",
}


class Calls:
    """The calls of a stage on a device: how messages name each, and what is to be told of them.

    What is counted, and what of: "step 3 of denoise".
    """

    def __init__(self, device: DeviceFacts, stage: str, counts: str, of: str) -> None:
        self.stage = stage
        self._device = device
        self._counts, self._of = counts, of
        self._told: list[Event] = []

    def place(self, number: int) -> str:
        """Such as "step 3 of denoise"."""
        return f"{self._counts} {number} of {self._of}"

    def where(self, number: int) -> str:
        """The place, and whether memory is near its limit there, if the system tells."""
        memory = memory_verdict(self._device)
        return self.place(number) + (f" ({memory})" if memory else "")

    def tell(self, *events: Event) -> None:
        """Have these handed on."""
        self._told += events

    def events(self) -> Iterator[Event]:
        """What was told since this was last asked."""
        told, self._told = self._told, []
        yield from told


def told_of(fault: Fault, why: str) -> str:
    """The fault in a clause; `why` is one of `_CAUSES`."""
    if fault.wide is None and why != "unclear":
        return f"{fault.operation} in {fault.place} handed on values that are not finite"
    dtype = dtype_name(fault.dtype)
    told = _CAUSES[why].format(wide=fault.wide, dtype=dtype, limit=torch.finfo(fault.dtype).max)
    return (
        f"{fault.operation} in {fault.place} made values that are not finite in {dtype} "
        f"(operands {fault.given}, result {fault.made}; {told})"
    )


def prompt_was_cut(cut: str) -> Note:
    """That a text encoder could not hold all of the prompt, and which words of it went."""
    said = f"the prompt is too long for the model; its end is cut: {cut!r}"
    return Note(said, in_record=True)


def weights_told(parts: Mapping[str, nn.Module], place: str) -> str:
    """That the weights of these components are broken, the one at `place` first."""
    bad = bad_weights(parts)
    name, tensor = next((each for each in bad if each[0] == place), bad[0])
    count = int((~tensor.isfinite()).sum())
    more = f", and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
    dtype = dtype_name(tensor.dtype)
    why = "The file is broken"
    if dtype != "float32":
        why = f"Either the file is broken, or they do not fit into {dtype}; --dtype fp32 tells"
    return (
        f"the weights themselves are not finite: {name} in {count} of {tensor.numel()} values"
        f"{more}. {why}. Nothing was written"
    )


def asks_for(prompt: str, frames_TX: Tensor) -> bool:
    """Whether the prompt asks for frames (values 0..1) of the one colour that these are of."""
    low, high = float(frames_TX.min()), float(frames_TX.max())
    return any(
        least <= low and high <= most and re.search(rf"\b({words})\b", prompt, re.IGNORECASE)
        for words, (least, most) in _ASKS_FOR.items()
    )
