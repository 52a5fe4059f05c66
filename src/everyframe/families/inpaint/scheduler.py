"""Build the checkpoint's own diffusers scheduler from its config, and its timesteps.

The sampling loop is `everyframe.samplers.diffusers_scheduler`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from everyframe.core.errors import CheckpointError, InputError, MissingPackageError
from everyframe.families.inpaint.config import SCHEDULERS


def make_scheduler(config: Mapping[str, Any]) -> Any:
    """Build a new scheduler; each sampler run needs its own, since schedulers count their steps.

    Config keys unknown to the class are ignored, as in diffusers: Stable Diffusion 1.5 itself has
    keys of another scheduler. Raises `CheckpointError` for values that the class rejects.
    """
    import diffusers

    name = str(config["_class_name"])
    assert name in SCHEDULERS, "checked when the config was read"
    kind: Any = getattr(diffusers, name)
    known = inspect.signature(kind.__init__).parameters
    values = {key: value for key, value in config.items() if key in known}
    try:
        return kind(**values)
    except ImportError as error:
        raise MissingPackageError(
            f"the checkpoint's {name} needs a package that is not installed: {error}"
        ) from error
    except (ValueError, NotImplementedError, TypeError) as error:
        raise CheckpointError(f"the checkpoint's {name} can't be made: {error}") from error


def num_timesteps(config: Mapping[str, Any], num_inference_steps: int, strength: float) -> int:
    """Number of steps; some schedulers run one step twice. Raises as `set_timesteps` does."""
    return _num_timesteps(json.dumps(config), num_inference_steps, strength)


@lru_cache(maxsize=64)
def _num_timesteps(config: str, num_inference_steps: int, strength: float) -> int:
    # Some diffusers schedulers warn when they are built, so they are built seldom.
    return len(set_timesteps(make_scheduler(json.loads(config)), num_inference_steps, strength))


def set_timesteps(
    scheduler: Any, num_inference_steps: int, strength: float, device: str = "cpu"
) -> Any:
    """Set the scheduler's timesteps and return the last `strength` share of them, (N,).

    Raises:
        InputError: no step remains, or the scheduler does not support that many.
    """
    try:
        scheduler.set_timesteps(num_inference_steps, device=device)
    except (ValueError, IndexError) as error:
        raise InputError(
            f"{type(scheduler).__name__} can't do {num_inference_steps} steps: {error}"
        ) from error
    kept = min(int(num_inference_steps * strength), num_inference_steps)
    first = (num_inference_steps - kept) * scheduler.order
    timesteps = scheduler.timesteps[first:]
    if not len(timesteps) or not kept:
        raise InputError(
            f"strength {strength:g} of {num_inference_steps} steps leaves none to be done; "
            f"raise strength to {1 / num_inference_steps:.3g} or more, or num_inference_steps"
        )
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    return timesteps
