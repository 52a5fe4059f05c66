"""A pipeline's call in a dry run, and which of its errors are answers whatever the numbers are.

What it says before any of its modules has worked, and what its own checks say, is about what was
asked. That diffusers has no such code, with the packages that are installed, is about this place.
Any other error may come of tensors without numbers, and is left to whoever called.
Read next: `rehearsals.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

from diffusers.configuration_utils import FrozenDict
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from everyframe.core.errors import CannotRunError, InputError


def called(pipe: Any, arguments: Mapping[str, Any]) -> object:
    """What the pipeline gives for these arguments.

    Raises:
        InputError: its own checks refuse them. CannotRunError: diffusers has no code for it.
    """
    with _worked() as worked:
        try:
            return pipe(**arguments)
        except (
            ValueError, NotImplementedError, AttributeError, TypeError, NameError, ArithmeticError,
        ) as error:  # fmt: skip
            text, name = " ".join(str(error).split()), type(pipe).__name__
            if isinstance(error, (ValueError, ArithmeticError)) and (
                _is_check(error) or not worked
            ):
                raise InputError(f"{name} refuses: {text}") from error
            if _is_lacking(error):
                raise CannotRunError(_lacks(name, text)) from error
            raise


@contextmanager
def _worked() -> Iterator[list[nn.Module]]:
    """The modules that have worked so far; nothing can come of missing numbers before the first."""
    worked: list[nn.Module] = []
    hook = register_module_forward_pre_hook(lambda module, _: worked.append(module))
    try:
        yield worked
    finally:
        hook.remove()


def _is_check(error: Exception) -> bool:
    """Whether a pipeline's own check said so: all of diffusers' have one function for that."""
    return any(
        frame.name.lstrip("_") == "check_inputs" for frame in extract_tb(error.__traceback__)
    )


def _is_lacking(error: Exception) -> bool:
    """Whether there is no such code: diffusers says so itself, asks one of its parts, or a config,
    for what that doesn't have, or gives a function of its own what that doesn't take. What torch
    lacks on the stand-in is not meant.
    """
    if isinstance(error, AttributeError):
        return isinstance(error.obj, (nn.Module, FrozenDict))
    if "diffusers" not in Path(extract_tb(error.__traceback__)[-1].filename).parts:
        return False
    is_call = isinstance(error, TypeError) and "unexpected keyword argument" in str(error)
    # A name that isn't there is that of a package which is imported where it is installed.
    return is_call or isinstance(error, (NotImplementedError, NameError))


def _lacks(name: str, text: str) -> str:
    import diffusers
    import transformers

    hint = "; with --vae-tiling it can" if "without tiling" in text else ""
    return (
        f"{name} can't do this with diffusers {diffusers.__version__} and transformers "
        f"{transformers.__version__}: {text}{hint}"
    )
