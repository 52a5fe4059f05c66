"""Replay log of a diffusers pipeline: results of component calls, one file each, in call order.

Files are written atomically and named by a hash of their content. Each contains a digest of the
call's arguments, and a result is replayed for that call only. From the first missing, corrupt or
mismatching result on, calls are computed again. `everyframe.diffusers_pipelines.calls.module_calls`
replays them.
"""

from __future__ import annotations

import json
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
from everyframe.core.paths import replace_file
from everyframe.core.plan import Repair
from everyframe.runs.checksummed_json import UNREADABLE, checksum
from everyframe.runs.tensor_store import flatten, laid_out
from everyframe.runtime.run_logs import GivenInput

_FORM, _REPAIRS, _CALL = "form", "remedies", "call"
#: Libraries whose output classes can be restored; they are mappings of tensors.
_LIBRARIES = ("diffusers", "transformers")


class FileReplayLog:
    """Results of one video in `folder`: saved ones first, then new ones.

    `on_note` receives messages: why a result can't be saved (once, as saving then stops), and why
    a saved one can't be replayed.
    """

    def __init__(self, folder: Path, on_note: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_note = on_note
        self._number = 0
        self._is_off = False
        self._files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        #: Calls without a result so far, oldest first.
        self._open: deque[str] = deque()

    def next(self, call: str) -> Any:
        """Saved result of the next call, whose digest is `call`; None if it must be computed."""
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
        """Restart at the first call: the pipeline is called once more."""
        self._number = 0
        self._open.clear()

    def repairs(self) -> tuple[Repair, ...]:
        """The repairs active in the last saved result."""
        while self._files:
            last = len(self._files) - 1
            try:
                metadata = _metadata(_whole(self._files[last], last))
                return tuple(Repair(**each) for each in json.loads(metadata[_REPAIRS]))
            except CorruptRunError as error:
                self._give_up(last, str(error))
            except UNREADABLE as error:
                self._give_up(last, f"{self._files[last]} can't be read: {error!r}")
        return ()

    def keep(self, answer: Any, repairs: tuple[Repair, ...]) -> None:
        """Save the result of the oldest call that `next` had none for, with its repairs.

        A result without a preceding `next` is not saved, since it would not be replayed either.
        """
        call = self._open.popleft() if self._open else None
        if self._is_off or call is None:
            return
        try:
            tensors: dict[str, Tensor] = {}
            form = json.dumps(_take_apart(answer, tensors))
            each = json.dumps([asdict(repair) for repair in repairs])
            data = save_tensors(tensors, metadata={_FORM: form, _REPAIRS: each, _CALL: call})
            # Not fsynced: the hash reveals what a power cut lost, and it is computed again.
            path = self._folder / _name(self._number, data)
            replace_file(path, data)
        except (OSError, NotSerializableError) as error:
            self._is_off = True
            why = getattr(error, "strerror", None) or str(error)
            self._on_note(
                f"the model calls of this pipeline can't be saved ({why}); the run continues, and "
                "if it is interrupted they are computed again"
            )
            return
        self._files.append(path)
        self._number += 1

    def _give_up(self, number: int, why: str) -> None:
        """Discard this result and all later ones."""
        count = len(self._files) - number
        again = "it is" if count == 1 else f"it and the {count - 1} after it are"
        self._on_note(
            f"answer {number + 1} of before can't be used ({why}); {again} computed again"
        )
        for path in self._files[number:]:
            path.unlink(missing_ok=True)
        del self._files[number:]


def _name(number: int, data: bytes) -> str:
    return f"{number:06d}-{checksum(data)}.safetensors"


def _whole(path: Path, number: int) -> bytes:
    """Bytes of the result with that number; `CorruptRunError` if they changed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CorruptRunError(f"{path} can't be read: {error.strerror or error}") from error
    if path.name != _name(number, data):
        raise CorruptRunError(f"{path} is not as it was written")
    return data


def _metadata(data: bytes) -> dict[str, str]:
    """Metadata of a safetensors file, which begins with the length of its JSON header."""
    length = int.from_bytes(data[:8], "little")
    metadata: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return metadata


def _read(path: Path, number: int, call: str) -> Any:
    """The result in a file. Raises `CorruptRunError` if it is of another call, or corrupt."""
    data = _whole(path, number)
    try:
        metadata = _metadata(data)
        if metadata[_CALL] != call:
            raise CorruptRunError("its call was given something else than before")
        return _put_together(json.loads(metadata[_FORM]), load_tensors(data))
    except (SafetensorError, ImportError, *UNREADABLE) as error:
        raise CorruptRunError(f"{path} can't be read: {error!r}") from error


def _take_apart(answer: Any, tensors: dict[str, Tensor]) -> Any:
    """The structure of a result, with its tensors moved into `tensors`."""
    if answer is None:
        return None
    if isinstance(answer, Tensor):
        name = f"t{len(tensors)}"
        tensors[name], layout = flatten(answer)
        return {"tensor": name, **layout}
    if isinstance(answer, GivenInput):
        return {"given": answer.name}
    if type(answer) in (tuple, list):
        kind = "tuple" if type(answer) is tuple else "list"
        return {kind: [_take_apart(each, tensors) for each in answer]}
    if isinstance(answer, Mapping) and _is_known(type(answer)):
        place = f"{type(answer).__module__}:{type(answer).__qualname__}"
        items = {name: _take_apart(each, tensors) for name, each in answer.items()}
        return {"output": place, "items": items}
    raise NotSerializableError(
        f"a model answered with a {type(answer).__name__}, which can't be saved"
    )


def _put_together(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    if form is None:
        return None
    if "tensor" in form:
        return laid_out(tensors[form["tensor"]], form)
    if "given" in form:
        return GivenInput(form["given"])
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
