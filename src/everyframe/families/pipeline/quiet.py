"""Nothing is printed: the bars and warnings of diffusers and transformers, while they work for us.

What a person should know of a run is an event of ours. Read next: `stages.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def silent(pipe: Any) -> Iterator[None]:
    """Within, the pipeline draws no progress bars."""
    owners = [pipe, *_all_blocks(getattr(pipe, "_blocks", None))]
    name = "_progress_bar_config"
    before = [(owner, vars(owner).get(name)) for owner in owners]
    for owner in owners:
        vars(owner)[name] = {**(vars(owner).get(name) or {}), "disable": True}
    try:
        yield
    finally:
        for owner, config in before:
            vars(owner).pop(name, None)
            if config is not None:
                vars(owner)[name] = config


@contextmanager
def quiet_libraries(*, even_errors: bool = False) -> Iterator[None]:
    """Within, diffusers and transformers draw no bars and say nothing short of an error.

    With `even_errors` not that either: for what may fail, and is told in other words then.
    """
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    libraries: tuple[Any, ...] = (of_diffusers, of_transformers)
    before = [
        (library, library.get_verbosity(), library.is_progress_bar_enabled())
        for library in libraries
    ]
    for library in libraries:
        library.set_verbosity(library.CRITICAL if even_errors else library.ERROR)
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library, verbosity, has_bars in before:
            library.set_verbosity(verbosity)
            if has_bars:
                library.enable_progress_bar()


def _all_blocks(blocks: Any) -> Iterator[Any]:
    """The blocks of a modular pipeline, all the way down; nothing for a plain one.

    Its own ones: what it shows as ``blocks`` is a copy.
    """
    if blocks is not None:
        yield blocks
        for block in getattr(blocks, "sub_blocks", {}).values():
            yield from _all_blocks(block)
