"""Words: of a fault, and of prompts that ask for what else is one. Read next: `guarding.py`."""

from __future__ import annotations

import re

import torch

from everyframe.core.events import Note
from everyframe.numerics.locate import Fault
from everyframe.precision.dtypes import dtype_name

#: Words of a prompt that ask for frames of one colour.
_ASKS_FOR_BLANK = re.compile(
    r"\b(black|dark|darkness|night|white|blank|empty|plain|solid|fades?|fading)\b", re.IGNORECASE
)

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


def told_of(fault: Fault, why: str) -> str:
    """The fault in a clause; `why` is one of `_CAUSES`."""
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


def asks_for_blank(prompt: str) -> bool:
    """Whether frames of one colour are what the prompt asks for."""
    return _ASKS_FOR_BLANK.search(prompt) is not None
