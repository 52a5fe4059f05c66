"""Batch membership of a run: none, or one `BatchMember`.

The batch is `everyframe.engine.batched_runs`. A run uses its member to denoise, and before it
changes a module that it shares with other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol

from everyframe.runtime.model_sharding import ModelPatch


class BatchMember(Protocol):
    """One run of a batch."""

    def denoising(
        self,
        modules: Mapping[str, Any],
        shard: Callable[[Mapping[str, Any]], ModelPatch],
    ) -> AbstractContextManager[ModelPatch]:
        """Context: the run denoises with these modules, which all runs of the batch share."""
        ...

    def change_modules(self, why: str) -> None:
        """Note that the run is about to change modules of its stage.

        Raises:
            LeftBatchError: other runs compute with them.
        """
        ...

    def meeting(self) -> AbstractContextManager[None]:
        """Context: calls of the modules may be computed together with those of other runs."""
        ...


#: The member of the run that is computed now.
MEMBER: ContextVar[BatchMember | None] = ContextVar("batch member", default=None)


def change_modules(why: str) -> None:
    """Note a change of modules; in a batch, `BatchMember.change_modules`."""
    member = MEMBER.get()
    if member is not None:
        member.change_modules(why)
