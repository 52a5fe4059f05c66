"""Refuse pickled weights where only safetensors are accepted, and say how to convert them.

Pickles are accepted only for releases without other files (Open-Sora and components of Step-Video);
`torch_file` reads tensors from these and nothing else.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NoReturn

from everyframe.checkpoints.folder import PICKLE_SUFFIXES
from everyframe.core.errors import CheckpointError

SAFE = ".safetensors"

#: Program that copies the tensors of a pickle, and nothing else, to safetensors.
_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; a, b = sys.argv[1:]; "
    "d = torch.load(a, map_location='cpu', weights_only=True); d = d.get('state_dict', d); "
    "save_file({k: v.contiguous() for k, v in d.items()}, b)"
)


def refuse_pickled(where: str, name: str, folder: Path, loader: str = "DiffusionPipeline") -> None:
    """Raise `CheckpointError` if `folder` holds the weights of a component as pickles only.

    Args:
        where: what diffusers' `loader` would load: a folder or a hub id.
        name: the component, for the message.
        folder: where its weights are; a missing folder is reported elsewhere.
        loader: diffusers' class that reads pickles and writes safetensors.
    """
    if folder.is_dir():
        names = sorted(file.name for file in folder.iterdir())
        pickled = _only_pickled(names)
        if pickled:
            raise _refusal(
                where, f"the weights of its {name} are", pickled, _save_code(loader, where)
            )


def refuse_pickled_files(where: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Like `refuse_pickled`, before the download.

    `names` are the files of the repository `where`, `patterns` those that are wanted.
    """
    if any(pattern.endswith(PICKLE_SUFFIXES) for pattern in patterns):
        return
    for folder in {PurePosixPath(each).parent for each in patterns if each.endswith(SAFE)}:
        pickled = _only_pickled([each for each in names if PurePosixPath(each).parent == folder])
        if pickled:
            how = _save_code("MODEL_CLASS", where)
            raise _refusal(where, "its weights are", pickled, how)


def refuse_pickled_file(path: Path) -> NoReturn:
    """Raise `CheckpointError` for a pickle that is a whole model."""
    safe = path.with_suffix(SAFE).name
    command = f'python -c "{_CONVERT}" {shlex.join([str(path), safe])}'
    how = f"{command} writes safetensors; then give {safe}"
    raise _refusal(str(path), "its weights are", path.name, how)


def _refusal(where: str, what: str, file: str, how: str) -> CheckpointError:
    """Error with the conversion command and the step after it in `how`."""
    return CheckpointError(
        f"{where}: {what} pickled ({file}), and reading a pickle can run any program. Take the "
        f"safetensors of the same release; or, if you trust whoever made them, convert them once: "
        f"{how}"
    )


def _save_code(loader: str, where: str) -> str:
    return (
        f"{loader}.from_pretrained({where!r}, use_safetensors=False).save_pretrained(FOLDER) "
        "writes safetensors; then give FOLDER"
    )


def _only_pickled(names: Sequence[str]) -> str | None:
    if any(name.endswith(SAFE) for name in names):
        return None
    return next((name for name in names if name.endswith(PICKLE_SUFFIXES)), None)
