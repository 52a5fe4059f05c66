"""Weights in pickles, where safetensors alone are taken: refused, with how they are converted.

That is everywhere but in the releases that have no other files, Open-Sora's and parts of
Step-Video's: of these `pickles` reads tensors and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from everyframe.checkpoints.folder import PICKLE_SUFFIXES
from everyframe.core.errors import CheckpointError

SAFE = ".safetensors"


def refuse_pickled(where: str, name: str, folder: Path, loader: str = "DiffusionPipeline") -> None:
    """Raise `CheckpointError` if `folder` holds the weights of the part `name` in pickles only.

    Args:
        where: what diffusers' `loader` would load: a folder or a hub id.
        name: the part, for people.
        folder: where its weights lie; one that does not exist is somebody else's to tell of.
        loader: diffusers' class that reads pickles and writes safetensors.
    """
    if folder.is_dir():
        names = sorted(file.name for file in folder.iterdir())
        pickled = _only_pickled(names)
        if pickled:
            raise _refusal(where, f"the weights of its {name} are", pickled, loader)


def refuse_pickled_files(where: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """The same before anything is fetched: `names` are the files of the repository `where`,
    `patterns` are what is wanted of them."""
    if any(pattern.endswith(PICKLE_SUFFIXES) for pattern in patterns):
        return
    for folder in {PurePosixPath(each).parent for each in patterns if each.endswith(SAFE)}:
        pickled = _only_pickled([each for each in names if PurePosixPath(each).parent == folder])
        if pickled:
            raise _refusal(where, "its weights are", pickled, "MODEL_CLASS")


def _refusal(where: str, what: str, file: str, loader: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: {what} pickled ({file}), and reading a pickle can run any program. If you "
        "trust whoever made them, convert them once: "
        f"{loader}.from_pretrained({where!r}, use_safetensors=False).save_pretrained(FOLDER) "
        "writes safetensors; then give FOLDER"
    )


def _only_pickled(names: Sequence[str]) -> str | None:
    if any(name.endswith(SAFE) for name in names):
        return None
    return next((name for name in names if name.endswith(PICKLE_SUFFIXES)), None)
