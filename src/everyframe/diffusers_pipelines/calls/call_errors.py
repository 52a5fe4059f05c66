"""Errors of a pipeline's call, for a person: refused input, no memory, a failure of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from everyframe.core.errors import CannotRunError, EveryframeError, InputError
from everyframe.core.options import shown
from everyframe.diffusers_pipelines.calls.call_results import CallOutOfMemory

#: A tensor or an array as Python writes it; its numbers have no parentheses.
_TENSOR = re.compile(r"\b(tensor|array)\(\[[^()]*\)")


def beyond_memory(
    made: CallOutOfMemory, tried: Sequence[str], *, is_in_memory: bool
) -> CannotRunError:
    """The error of a call that has no memory fallback left.

    Args:
        made: where the last call ran out of memory.
        tried: the fallbacks that were tried, in words.
        is_in_memory: whether the pipeline is its owner's, who can set it up otherwise.
    """
    was_tried = f" (tried: {'; '.join(tried)})" if tried else ""
    less = "use a smaller size or num_frames"
    if is_in_memory:
        less += ", pipe.vae.enable_tiling() or pipe.enable_model_cpu_offload()"
    return CannotRunError(
        f"{made.place}: out of memory, and no memory fallback is left{was_tried}; {less}, "
        f"or close other programs that use this memory ({made.message})"
    )


def explained(
    error: Exception, step: int, name: str, own: Mapping[str, Any], notes: Sequence[str]
) -> Exception:
    """Classify the pipeline's error: refused input, or a failure of its own.

    Args:
        error: what the call raised.
        step: the last step that began; 0 before the first.
        name: the pipeline's class.
        own: given parameters that only this pipeline has.
        notes: of the plan, with what its dry run met.
    """
    whole = " ".join(str(error).split())
    # Diffusers quotes whole tensors, such as prompt_embeds beside a prompt: pages of numbers.
    text = _TENSOR.sub(r"\1(...)", whole)
    if isinstance(error, EveryframeError):
        return error
    if isinstance(error, (ValueError, ArithmeticError)) and not step:
        return InputError(f"{name} refuses: {text}")
    if any(f": {whole})" in note for note in notes):
        # The dry run met it without weights and device: it comes of the request and the config.
        return InputError(
            f"{name} can't do this on any device; another size may do, or the checkpoint's "
            f"config is wrong ({type(error).__name__}: {text})"
        )
    if own and not step and not isinstance(error, (ImportError, NameError)):
        # What only this pipeline knows is checked by nobody but itself, by whatever breaks. It is
        # named and not blamed: components in two dtypes break before the first step as well.
        given = ", ".join(f"{key}={shown(value)}" for key, value in own.items())
        return InputError(
            f"{name} failed before its first step, where it was given {given}: "
            f"{type(error).__name__}: {text}"
        )
    when = f"in step {step} or after it" if step else "before its first step"
    return EveryframeError(f"{name} failed {when}: {type(error).__name__}: {text}")
