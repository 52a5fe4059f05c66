"""Trial of `cached-constants`: a component's blocks with and without their constant results.

See `trials` for the others, and for the process that it runs in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from everyframe.fast_paths.benchmark import Comparison
from everyframe.fast_paths.certification.extract_blocks import (
    BlockLocation,
    ExtractedBlock,
    blocks_of,
)
from everyframe.fast_paths.certification.target import CertificationTarget, TargetCall
from everyframe.fast_paths.modules.constant_modules import ConstantModule, find_constant_modules
from everyframe.fast_paths.modules.constant_results import CachedConstants
from everyframe.fast_paths.registry import FastPath
from everyframe.ops.call_override import ModuleCall, override_call


def constants(subject: CertificationTarget, path: FastPath) -> Iterator[Comparison]:
    """Compare whole blocks, as in the second and later steps of a video.

    Raises:
        RuntimeError: nothing in the component is constant.
    """
    for call in subject.calls:
        found = _constant_modules(subject, call)
        if not found:
            raise RuntimeError("nothing in this model is the same in every step")
        for each in blocks_of(replace(subject, calls=(call,))):
            plain = each.alone(())
            yield each.compare(plain, _with_cache(each, found) or plain)


def _constant_modules(subject: CertificationTarget, call: TargetCall) -> tuple[ConstantModule, ...]:
    """The modules whose results no step changes, seen in a dry run of the call."""
    seen: list[tuple[ConstantModule, ...]] = []

    def follow(call: ModuleCall) -> Any:
        result, found = find_constant_modules(call)
        seen.append(found)
        return result

    with override_call(call.module(), follow):
        call.dry_run(subject.precision, subject.device)
    return seen[0] if seen else ()


def _with_cache(block: ExtractedBlock, found: tuple[ConstantModule, ...]) -> BlockLocation | None:
    """The block with its constant results stored; None if it has none."""
    inside = tuple(
        replace(one, name=f"blocks.0{one.name.removeprefix(block.name)}")
        for one in found
        if one.name.startswith(f"{block.name}.")
    )
    if not inside:
        return None
    alone = block.alone(())
    CachedConstants(alone, modules=inside).__enter__()  # it ends with the process
    for _ in range(2):  # the second call confirms tables of positions
        block.given.call(alone)
    return alone
