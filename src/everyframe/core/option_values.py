"""Convert Python values of options to the text that the command line would give.

Examples: ``device=torch.device("cuda:1")``, ``dtype=torch.bfloat16``, ``size=(640, 360)``,
``devices=[0, 1]``, ``max_memory=8_000_000_000``. A request holds the same text for both spellings.
Any other value is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

from everyframe.core.components import parse_components
from everyframe.core.errors import InputError
from everyframe.core.lora import parse_loras
from everyframe.core.options import shown


def _of_torch(given: Any) -> Any:
    """Name of ``torch.float32`` or ``torch.device("cuda")``, without importing torch."""
    is_torchs = type(given).__module__ == "torch" and type(given).__name__ in ("device", "dtype")
    return str(given).removeprefix("torch.") if is_torchs else given


def _is_whole(given: Any) -> bool:
    return hasattr(type(given), "__index__") and not isinstance(given, bool)


def _whole(given: Any) -> Any:
    """Digits of an integer."""
    return str(int(given)) if _is_whole(given) else given


def _number(given: Any) -> Any:
    """Digits of a number, of NumPy's too; of a float all that it takes to read it back."""
    is_fraction = isinstance(given, Real) and not isinstance(given, Integral)
    return repr(float(given)).removesuffix(".0") if is_fraction else _whole(given)


def _pair(given: Any, between: str) -> Any:
    """Two integers as text, width before height."""
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2 and all(map(_is_whole, given))
    return between.join(map(_whole, given)) if is_pair else given


def _join(given: Any) -> Any:
    """Names or numbers, joined by commas."""
    if not isinstance(given, (tuple, list)) or not given:
        return given
    texts = [_number(_of_torch(each)) for each in given]
    return ",".join(texts) if all(isinstance(each, str) for each in texts) else given


_AMOUNT = "an amount such as 8GB, or bytes"
#: Option -> its converter and a description of the values that it accepts.
SPELLED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "device": (_of_torch, "a device such as cuda:1"),
    "dtype": (_of_torch, "a dtype such as bf16"),
    "size": (partial(_pair, between="x"), "WIDTHxHEIGHT, or (width, height)"),
    "aspect": (partial(_pair, between=":"), "WIDTH:HEIGHT, or (width, height)"),
    "devices": (_join, "names or numbers of devices such as 0,1"),
    "shares": (_join, "numbers such as 24,8"),
    "max_memory": (_whole, _AMOUNT),
    "max_host_memory": (_whole, _AMOUNT),
}


def option_text(name: str, given: Any) -> Any:
    """Text of an option's Python value; None stays None.

    Raises:
        InputError: the value has no such text.
    """
    write, allowed = SPELLED[name]
    text = write(given)
    if not isinstance(text, str) and text is not None:
        raise InputError(f"{name} must be {allowed}, got {shown(given)}")
    return text


def _names(given: Any) -> Any:
    """Names of a list, or separated by commas."""
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, (list, tuple)):
        return given
    names = (name for each in listed for name in str(each).split(","))
    return tuple(name.strip() for name in names if name.strip())


#: Option that may be repeated -> the reader of its forms.
REPEATED: dict[str, Callable[[Any], Any]] = {
    "loras": parse_loras, "components": parse_components, "disable": _names,
}  # fmt: skip

#: Option -> other options of the same thing, which it replaces. An aspect is of a resolution.
_REPLACES = {
    "size": ("height", "width", "resolution", "aspect"),
    "height": ("size", "resolution", "aspect"),
    "width": ("size", "resolution", "aspect"),
    "resolution": ("size", "height", "width"),
    "aspect": ("size", "height", "width"),
    "num_frames": ("seconds",),
    "seconds": ("num_frames",),
    "image": ("extend",),
    "extend": ("image",),
    "device": ("devices",),
    "devices": ("device", "num_devices"),
    "num_devices": ("devices", "shares"),
}


def replaced_by(given: Iterable[str]) -> set[str]:
    """The given options, and others that they replace: ``size`` replaces a default ``height``."""
    given = {*given}
    return given | {other for name in given for other in _REPLACES.get(name, ())}


#: Earlier name of an option, still read -> its name.
_RENAMED = {"without": "disable", "remedies": "repairs", "paths": "fast_paths"}


def with_current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options that a caller or a record gives by an earlier name.

    Raises:
        InputError: an option is given by both names.
    """
    for old, new in _RENAMED.items():
        if old in options and new in options:
            raise InputError(f"{old} is the earlier name of {new}; give {new} alone")
    return {_RENAMED.get(name, name): value for name, value in options.items()}
