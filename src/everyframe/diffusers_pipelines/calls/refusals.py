"""What a pipeline refuses, and what this diffusers lacks, by the errors of a dry run's call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

from diffusers.configuration_utils import FrozenDict
from torch import nn

from everyframe.core.errors import CannotRunError, InputError

#: A file of diffusers' pipelines, and what one names that checks a size.
_OF_PIPELINES = re.compile(r"[/\\]diffusers[/\\](modular_)?pipelines[/\\]")
_SIZE = re.compile("`(height|width|num_frames)`")


def call_checked(pipe: Any, arguments: Mapping[str, Any], modules: Iterable[nn.Module]) -> object:
    """Call the pipeline, which calls these modules, with these arguments.

    Raises:
        InputError: the pipeline's own checks refuse them.
        CannotRunError: this diffusers or transformers lacks the code.
    """
    with _record_called(modules) as worked:
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
def _record_called(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Context: the modules called so far; before the first, missing values can't cause an error."""
    worked: list[nn.Module] = []
    hooks = [
        each.register_forward_pre_hook(lambda module, _: worked.append(module)) for each in modules
    ]
    try:
        yield worked
    finally:
        for hook in hooks:
            hook.remove()


def _is_check(error: Exception) -> bool:
    """Whether it came from ``check_inputs``, or is a pipeline's own word on a size.

    Blocks of a modular pipeline check sizes where they need them, after others have worked.
    """
    frames = extract_tb(error.__traceback__)
    if _SIZE.search(str(error)) and _OF_PIPELINES.search(frames[-1].filename):
        return True
    return any(frame.name.lstrip("_") == "check_inputs" for frame in frames)


def _is_lacking(error: Exception) -> bool:
    """Whether the error means that diffusers lacks the code.

    True if diffusers raises NotImplementedError or NameError, reads an attribute that a module or
    config lacks, or passes an unknown keyword argument to its own function. Operations that torch
    lacks on the stand-in device do not count.
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
