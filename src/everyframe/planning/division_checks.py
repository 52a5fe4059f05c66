"""Checks of how a request divides its run among devices.

`parallelism` chooses where the request leaves that open.
"""

from __future__ import annotations

from everyframe.core.errors import InputError
from everyframe.core.parallel_plan import ParallelConfig, parse_parallel, parse_shares
from everyframe.core.plan import Settings
from everyframe.core.request import Request
from everyframe.runtime.interface import CfgParallelSpec, ModelSpec, ShardableSpec


def check_division(
    request: Request, model: ModelSpec, settings: Settings, num_devices: int
) -> None:
    """Raise `InputError` for a division impossible on that many devices; says what is possible."""
    shares_asked(request, num_devices)
    asked = parse_parallel(request.parallel)
    _check_degrees(asked, model, settings, num_devices)
    if request.shard_weights:
        _check_shards(asked, model, num_devices)


def shares_asked(request: Request, num_devices: int) -> tuple[float, ...] | None:
    """The shares that a request names; None if it leaves them open.

    Raises:
        InputError: they are invalid, or not one per device.
    """
    if request.shares is None:
        return None
    if num_devices == 1:
        raise InputError("shares has no effect on one device; give --num-devices or --devices")
    return parse_shares(request.shares, num_devices, parse_parallel(request.parallel).data or 1)


def _check_degrees(asked: ParallelConfig, model: ModelSpec, settings: Settings, count: int) -> None:
    data, cfg = asked.data or 1, asked.cfg or 1
    backends, shared = backends_of(model), isinstance(model, ShardableSpec)
    if not shared and (cfg > 1 or (asked.sequence or 1) > 1):
        raise InputError(
            f"{model.title} makes each video on one device: parallel can be data=N with "
            "--num-videos, not cfg or sequence"
        )
    if shared and not backends and (asked.sequence or 1) > 1:
        raise InputError(
            f"parallel {_written(asked)}: no token split of {model.title} is known; it "
            f"can be {_instead(model, settings, count)}"
        )
    if shared and backends and asked.backend and asked.backend not in backends:
        could = " or ".join(f"{backend or 'sequence'}={asked.sequence}" for backend in backends)
        raise InputError(
            f"parallel {_written(asked)}: {model.title} does not exchange its tokens by "
            f"{asked.backend}; it can be {could}"
        )
    if data > settings.num_videos:
        raise InputError(
            f"parallel data={data} wants at least {data} videos, got --num-videos "
            f"{settings.num_videos}; sequence={count} divides one video"
        )
    branches = _num_branches(model, settings) if cfg > 1 else 1
    if cfg > branches:
        can = (
            f"sequence={count} divides each video" if backends else "data=N deals out whole videos"
        )
        raise InputError(f"parallel cfg={cfg}: {_branches(model, settings, branches)}; {can}")
    if data * cfg > count:
        raise InputError(
            f"parallel data={data},cfg={cfg} wants {data * cfg} devices or more, got {count}"
        )
    if asked.sequence is None:
        return
    wanted = data * cfg * asked.sequence
    if wanted != count:
        raise InputError(
            f"parallel {_written(asked)} is for {wanted} devices, got {count}; for {count} it can "
            f"be auto, {_instead(model, settings, count)}"
        )


def _num_branches(model: ModelSpec, settings: Settings) -> int:
    return model.num_branches(settings) if isinstance(model, ShardableSpec) else 1


def _instead(model: ModelSpec, settings: Settings, count: int) -> str:
    """The possible parallel configs on that many devices, for one video or several."""
    right = [f"sequence={count}"] if backends_of(model) else []
    if count > 1 and _num_branches(model, settings) > 1:
        right.append("cfg=2, which splits any number of devices in two")
    return " or ".join(right or ["data=N with --num-videos"])


def _branches(model: ModelSpec, settings: Settings, count: int) -> str:
    """Text about the number of CFG branches, if more were requested."""
    if count > 1:
        return f"it has {count} branches"
    if isinstance(model, CfgParallelSpec):
        return model.why_one_branch(settings)
    if settings.guidance_scale <= 1:
        return "without guidance it has one branch"
    return f"{model.title} computes its branches of guidance in its own way"


def _check_shards(asked: ParallelConfig, model: ModelSpec, count: int) -> None:
    """Raise `InputError` if no other rank exists to shard weights with."""
    if count == 1:
        raise InputError(
            "shard_weights has no effect on one device; give --num-devices or --devices"
        )
    if not isinstance(model, ShardableSpec) or not model.is_collective:
        raise InputError(
            f"shard_weights has no effect on {model.title}, whose weights each device has whole; "
            "--max-memory brings them block by block"
        )
    if count // (asked.data or 1) < 2:
        raise InputError(
            f"parallel data={asked.data} leaves one of {count} devices for a video, and "
            "shard_weights wants two or more; "
            f"give {'data=' + str(count // 2) if count > 3 else 'data=1'}, or leave parallel out"
        )


def _written(asked: ParallelConfig) -> str:
    named = {"data": asked.data, "cfg": asked.cfg, asked.backend or "sequence": asked.sequence}
    return ",".join(f"{name}={number}" for name, number in named.items() if number is not None)


def backends_of(model: ModelSpec) -> tuple[str, ...]:
    """How a model can exchange its tokens; empty if it divides no video."""
    return model.sequence_backends if isinstance(model, ShardableSpec) else ()
