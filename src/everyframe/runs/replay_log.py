"""The answers of a foreign pipeline's models, each in a file of its own, in the order of the calls.

A file is there whole or not at all, its name holds the hash of what is in it, and in it stands the
digest of what its call was given: an answer is served to that call and to no other. What comes
after the first that is missing, damaged or another call's is computed again. Read next:
`everyframe.diffusers_pipelines.module_calls`, which serves them.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from everyframe.core.errors import CorruptRunError, NotSerializableError
from everyframe.core.plan import Repair
from everyframe.runs.atomic_write import UNFINISHED, UNREADABLE, checksum
from everyframe.runs.tensor_store import flattened, laid_out

_FORM, _REMEDIES, _CALL = "form", "remedies", "call"
#: Libraries whose classes of outputs are made again; they are mappings of tensors.
_LIBRARIES = ("diffusers", "transformers")


class FileReplayLog:
    """The answers of one take in `folder`: first those that are there, then those that come.

    `note` is given what a person should read: once why one can't be kept, as none is after it, and
    of each that is there and can't be served why not.
    """

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._note = note
        self._number = 0
        self._is_off = False
        self._files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        #: The calls that were made and whose answers have not come yet, oldest first.
        self._open: deque[str] = deque()

    def next(self, call: str) -> Any:
        """The answer to the next call, whose digest is `call`; None where it has to be made."""
        if self._number < len(self._files):
            try:
                answer = _read(self._files[self._number], self._number, call)
            except CorruptRunError as error:
                self._give_up(self._number, str(error))
            else:
                self._number += 1
                return answer
        self._open.append(call)
        return None

    def again(self) -> None:
        """From the first on: the pipeline is called once more."""
        self._number = 0
        self._open.clear()

    def remedies(self) -> tuple[Repair, ...]:
        """The repairs that the last answer that is there was made with."""
        while self._files:
            last = len(self._files) - 1
            try:
                told = _metadata(_whole(self._files[last], last))
                return tuple(Repair(**each) for each in json.loads(told[_REMEDIES]))
            except CorruptRunError as error:
                self._give_up(last, str(error))
            except UNREADABLE as error:
                self._give_up(last, f"{self._files[last]} can't be read: {error!r}")
        return ()

    def keep(self, answer: Any, remedies: tuple[Repair, ...]) -> None:
        """Keep the answer to the oldest call that `next` had none for, with its repairs.

        That of a call that nobody asked about is not kept, as it would not be served either.
        """
        call = self._open.popleft() if self._open else None
        if self._is_off or call is None:
            return
        try:
            tensors: dict[str, Tensor] = {}
            form = json.dumps(_taken_apart(answer, tensors))
            each = json.dumps([asdict(remedy) for remedy in remedies])
            data = save_tensors(tensors, metadata={_FORM: form, _REMEDIES: each, _CALL: call})
            self._folder.mkdir(parents=True, exist_ok=True)
            # Not awaited: what a power cut takes of it is seen by its hash, and made again.
            path = self._folder / _name(self._number, data)
            unfinished = path.with_name(path.name + UNFINISHED)
            unfinished.write_bytes(data)
            os.replace(unfinished, path)
        except (OSError, NotSerializableError) as error:
            self._is_off = True
            why = getattr(error, "strerror", None) or str(error)
            self._note(
                f"the answers of this pipeline's models can't be kept ({why}); it goes on, and if "
                "it is broken off they are computed again"
            )
            return
        self._files.append(path)
        self._number += 1

    def _give_up(self, number: int, why: str) -> None:
        """Neither that answer nor what came after it is served."""
        count = len(self._files) - number
        again = "it is" if count == 1 else f"it and the {count - 1} after it are"
        self._note(f"answer {number + 1} of before can't be used ({why}); {again} computed again")
        for path in self._files[number:]:
            path.unlink(missing_ok=True)
        del self._files[number:]


def _name(number: int, data: bytes) -> str:
    return f"{number:06d}-{checksum(data)}.safetensors"


def _whole(path: Path, number: int) -> bytes:
    """The bytes of the answer of that number; `CorruptRunError` if they are not as written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptRunError(f"{path} can't be read: {error.strerror or error}") from error
    if path.name != _name(number, data):
        raise CorruptRunError(f"{path} is not as it was written")
    return data


def _metadata(data: bytes) -> dict[str, str]:
    """What stands beside the tensors; a file of them begins with the length of its JSON header."""
    length = int.from_bytes(data[:8], "little")
    told: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return told


def _read(path: Path, number: int, call: str) -> Any:
    """The answer in a file. Raises `CorruptRunError` if it is another call's, or not as written."""
    data = _whole(path, number)
    try:
        told = _metadata(data)
        if told[_CALL] != call:
            raise CorruptRunError("its call was given something else than before")
        return _put_together(json.loads(told[_FORM]), load_tensors(data))
    except (SafetensorError, *UNREADABLE) as error:
        raise CorruptRunError(f"{path} can't be read: {error!r}") from error


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
    raise NotSerializableError(
        f"a model answered with a {type(answer).__name__}, which can't be kept"
    )


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
