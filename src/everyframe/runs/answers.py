"""The answers of a foreign pipeline's models, each in a file of its own, in the order of the calls.

A file is there whole or not at all, and its name holds the hash of what is in it: what comes after
the first that is missing or damaged is computed again. Read next:
`everyframe.families.pipeline.replaying`, which serves them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from everyframe.core.errors import DamagedError, NotPlainError
from everyframe.core.plan import Remedy
from everyframe.runs.files import UNFINISHED
from everyframe.runs.store import flattened, laid_out

_FORM, _REMEDIES = "form", "remedies"
#: Libraries whose classes of outputs are made again; they are mappings of tensors.
_LIBRARIES = ("diffusers", "transformers")


class KeptAnswers:
    """The answers of one take in `folder`: first those that are there, then those that come.

    `failed` is told why, once, when one can't be kept; none is kept after it.
    """

    def __init__(self, folder: Path, failed: Callable[[str], None]) -> None:
        self._folder = folder
        self._failed = failed
        self._number = 0
        self._is_off = False
        self._files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []

    def next(self) -> Any:
        """The answer to the next call; None where the call has to be made."""
        found = self._files[self._number] if self._number < len(self._files) else None
        answer = None if found is None else _read(found, self._number)
        if answer is None:
            # Those after it answer calls that came after this one.
            for path in self._files[self._number :]:
                path.unlink(missing_ok=True)
            self._files = self._files[: self._number]
            return None
        self._number += 1
        return answer

    def again(self) -> None:
        """From the first on: the pipeline is called once more."""
        self._number = 0

    def remedies(self) -> tuple[Remedy, ...]:
        """The repairs that the last answer that is there was made with."""
        if not self._files:
            return ()
        try:
            with safe_open(self._files[-1], "pt") as opened:
                return tuple(Remedy(**each) for each in json.loads(opened.metadata()[_REMEDIES]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            # It is not as it was written, so neither it nor what comes after it is served.
            self._files.pop().unlink(missing_ok=True)
            return self.remedies()

    def keep(self, answer: Any, remedies: tuple[Remedy, ...]) -> None:
        """Keep the answer to the call that was made, with the repairs that it needed."""
        if self._is_off:
            return
        try:
            tensors: dict[str, Tensor] = {}
            form = json.dumps(_taken_apart(answer, tensors))
            told = {_FORM: form, _REMEDIES: json.dumps([asdict(each) for each in remedies])}
            data = save_tensors(tensors, metadata=told)
            self._folder.mkdir(parents=True, exist_ok=True)
            # Not awaited: what a power cut takes of it is seen by its hash, and made again.
            path = self._folder / f"{self._number:06d}-{_hash(data)}.safetensors"
            unfinished = path.with_name(path.name + UNFINISHED)
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except (OSError, NotPlainError) as error:
            self._is_off = True
            self._failed(getattr(error, "strerror", None) or str(error))
            return
        self._files.append(path)
        self._number += 1


def _read(path: Path, number: int) -> Any:
    """The answer in a file; None if it is another call's, or not as it was written."""
    data = path.read_bytes()
    if path.name != f"{number:06d}-{_hash(data)}.safetensors":
        return None
    try:
        with safe_open(path, "pt") as opened:
            form = json.loads(opened.metadata()[_FORM])
        return _put_together(form, load_tensors(data))
    except (SafetensorError, KeyError, ValueError) as error:
        raise DamagedError(f"{path} can't be read: {error}") from error


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _taken_apart(answer: Any, tensors: dict[str, Tensor]) -> Any:
    """The form of an answer, with its tensors in `tensors`."""
    if answer is None:
        return None
    if isinstance(answer, Tensor):
        name = f"t{len(tensors)}"
        tensors[name], layout = flattened(answer)
        return {"tensor": name, **layout}
    if type(answer) in (tuple, list):
        kind = "tuple" if type(answer) is tuple else "list"
        return {kind: [_taken_apart(each, tensors) for each in answer]}
    if isinstance(answer, Mapping) and _is_known(type(answer)):
        place = f"{type(answer).__module__}:{type(answer).__qualname__}"
        items = {name: _taken_apart(each, tensors) for name, each in answer.items()}
        return {"output": place, "items": items}
    raise NotPlainError(f"a model answered with a {type(answer).__name__}, which can't be kept")


def _put_together(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    if form is None:
        return None
    if "tensor" in form:
        return laid_out(tensors[form["tensor"]], form)
    if "tuple" in form:
        return tuple(_put_together(each, tensors) for each in form["tuple"])
    if "list" in form:
        return [_put_together(each, tensors) for each in form["list"]]
    items = {name: _put_together(each, tensors) for name, each in form["items"].items()}
    return _output_class(form["output"])(**items)


def _output_class(place: str) -> type[Any]:
    module, _, name = place.partition(":")
    if module.partition(".")[0] not in _LIBRARIES:
        raise ValueError(f"{place} is no output of {' or '.join(_LIBRARIES)}")
    found = getattr(import_module(module), name)
    if not isinstance(found, type) or not _is_known(found):
        raise ValueError(f"{place} is no output of a model")
    return found


def _is_known(kind: type[Any]) -> bool:
    is_output = issubclass(kind, dict) and is_dataclass(kind)
    return is_output and kind.__module__.partition(".")[0] in _LIBRARIES
