"""Parallel layout of a run: what was asked for, and what each rank computes. Data only.

`everyframe.planning.parallelism` makes the layout; `everyframe.parallel` moves the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from everyframe.core.errors import InputError, did_you_mean

#: Kinds of sequence parallelism: chosen by the forecast, or named. A model supports some of them.
SEQUENCE = ("sequence", "ulysses", "ring")
DEGREES = ("data", "cfg", *SEQUENCE)


@dataclass(frozen=True)
class ParallelConfig:
    """Parsed ``--parallel``; None leaves a degree to the planner.

    Attributes:
        data: number of video groups; each group makes videos of its own.
        cfg: number of groups within a video group that split the guidance branches.
        sequence: number of devices that split the tokens of one branch.
        backend: how these exchange tokens, ``ulysses`` or ``ring``; empty if open.
    """

    data: int | None = None
    cfg: int | None = None
    sequence: int | None = None
    backend: str = ""


def parse_parallel(text: str) -> ParallelConfig:
    """Parse ``auto``, or degrees by name such as ``cfg=2,sequence=3``.

    Raises:
        InputError: anything else; the text says what is accepted.
    """
    if text.strip().casefold() == "auto":
        return ParallelConfig()
    asked: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        if name not in DEGREES or not equals or not number.isdecimal() or int(number) < 1:
            known = did_you_mean(name, DEGREES) if name not in DEGREES else ""
            raise InputError(
                f"parallel must be auto, or of data=N, cfg=N and sequence=N (or ulysses=N, ring=N) "
                f"such as cfg=2,sequence=3, got {text!r}{known}"
            )
        if name in asked:
            raise InputError(f"parallel names {name} twice: {text!r}")
        asked[name] = int(number)
    named = [name for name in SEQUENCE if name in asked]
    if len(named) > 1:
        raise InputError(
            f"parallel names {' and '.join(named)}, which are ways to do the same; give one of them"
        )
    backend = named[0] if named else ""
    return ParallelConfig(
        asked.get("data"),
        asked.get("cfg"),
        asked.get(backend),
        "" if backend == "sequence" else backend,
    )


#: Largest ratio of two shares; beyond it a device would have nothing to do.
MOST_APART = 1_000_000


def parse_shares(text: str, num_devices: int, num_groups: int = 1) -> tuple[float, ...]:
    """Parse relative shares, one number a device, such as ``24,8``.

    Each of `num_groups` groups of devices, with videos of its own, needs one above 0.

    Raises:
        InputError: wrong count of numbers, too few above 0, or not all are numbers of 0 or more.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    is_right = len(numbers) == num_devices and any(numbers)
    if not is_right or not all(0 <= number < float("inf") for number in numbers):
        example = ",".join(["24", "8", *["8"] * num_devices][:num_devices])
        raise InputError(
            f"shares must be {num_devices} numbers, one for each device, such as {example} for "
            f"cards of so many GB; got {text!r}"
        )
    if num_groups > sum(map(bool, numbers)):
        raise InputError(
            f"parallel data={num_groups} wants {num_groups} devices with a share above 0, got "
            f"shares {text!r}"
        )
    least = min(number for number in numbers if number)
    if max(numbers) > MOST_APART * least:
        raise InputError(
            f"shares may be up to {MOST_APART:,} times as large as others, got {text!r}; a device "
            "that is to do nothing has the share 0"
        )
    return numbers


@dataclass(frozen=True)
class RankPlan:
    """Work of one rank.

    Attributes:
        device: torch's device name.
        group: index of its video group.
        speed: speed relative to the other ranks.
        token_share: share (0..1) of one video's tokens that it holds.
        attention_share: share of the tokens or heads during attention, where that is split
            differently.
        sent_bytes: bytes that it sends at each step.
        idle_reason: when it has nothing to do; empty if it always works.
        weight_bytes: bytes of sharded weights that it sends at each step.
        memory_share: memory for sharded weights relative to the other ranks; sets its share of
            them.
        is_active: False if it computes no part of any video.
    """

    device: str
    group: int
    speed: float
    token_share: float = 1.0
    attention_share: float = 1.0
    sent_bytes: int = 0
    idle_reason: str = ""
    weight_bytes: int = 0
    memory_share: float = 1.0
    is_active: bool = True


@dataclass(frozen=True)
class ParallelPlan:
    """Layout of a run on several ranks.

    Attributes:
        ranks: work of each rank.
        videos_per_group: number of videos that each video group makes.
        cfg_degree: number of groups within a video group that split the guidance branches.
        num_threads: CPU threads of each rank.
        backend: token exchange, for a model that supports several.
        finished_videos: numbers of videos that an interrupted run finished before;
            `videos_per_group` excludes them.
    """

    ranks: tuple[RankPlan, ...]
    videos_per_group: tuple[int, ...]
    cfg_degree: int = 1
    num_threads: int = 1
    backend: str = ""
    finished_videos: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each video group, in order."""
        numbers = range(len(self.videos_per_group))
        return tuple(
            tuple(rank for rank, plan in enumerate(self.ranks) if plan.group == number)
            for number in numbers
        )

    @property
    def active_groups(self) -> tuple[tuple[int, ...], ...]:
        """Working ranks of each video group."""
        return tuple(
            tuple(rank for rank in group if self.ranks[rank].is_active) for group in self.groups
        )

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each rank."""
        return tuple(rank.speed for rank in self.ranks)

    def reports_events(self, rank: int) -> bool:
        """Whether this rank reports events: the first rank of each video group does.

        Before the first stage only rank 0 reports.
        """
        return any(group[0] == rank for group in self.groups)

    def videos_of(self, group: int) -> tuple[int, ...]:
        """Numbers of the videos that this video group makes."""
        ends = [0, *accumulate(self.videos_per_group)]
        everything = range(ends[-1] + len(self.finished_videos))
        left = [number for number in everything if number not in self.finished_videos]
        return tuple(left[ends[group] : ends[group + 1]])

    def __str__(self) -> str:
        sizes = sorted({len(group) for group in self.active_groups}, reverse=True)
        sequence = " or ".join(str(-(-size // self.cfg_degree)) for size in sizes)
        backend = self.backend if sequence != "1" and self.backend else "sequence"
        return f"data={len(self.videos_per_group)}, cfg={self.cfg_degree}, {backend}={sequence}"
