"""How a run is divided among several devices: what was asked, and what each rank will do.

Plain data, as the plan holds it. Who decides is `everyframe.planning.parallelism`; what moves
tensors is `everyframe.parallel`. Read next: `plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from everyframe.core.errors import InputError, did_you_mean

#: Ways to share a video's tokens: as the forecast chooses, or as named. A model has some of them.
SEQUENCE = ("sequence", "ulysses", "ring")
WAYS = ("data", "cfg", *SEQUENCE)


@dataclass(frozen=True)
class ParallelConfig:
    """What ``--parallel`` asks for; None where it leaves the choice.

    `data` is into how many groups the devices are parted, each with videos of its own; `cfg` into
    how many parts the branches of guidance are, in each group; `sequence` is how many devices share
    the tokens of those, and `way` how they exchange them, empty where that is left open.
    """

    data: int | None = None
    cfg: int | None = None
    sequence: int | None = None
    way: str = ""


def parse_ways(text: str) -> ParallelConfig:
    """``auto``, or names with numbers such as ``cfg=2,sequence=3``.

    Raises:
        InputError: it is something else; the text says what would be right.
    """
    if text.strip().casefold() == "auto":
        return ParallelConfig()
    asked: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        if name not in WAYS or not equals or not number.isdigit() or int(number) < 1:
            known = did_you_mean(name, WAYS) if name not in WAYS else ""
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
    way = named[0] if named else ""
    return ParallelConfig(
        asked.get("data"), asked.get("cfg"), asked.get(way), "" if way == "sequence" else way
    )


#: The largest share over the smallest: beyond that a device has nothing to do.
MOST_APART = 1_000_000


def parse_shares(text: str, num_devices: int) -> tuple[float, ...]:
    """As many numbers as devices, such as ``24,8``; their ratios count.

    Raises:
        InputError: another number of them, or not all are numbers of 0 or more.
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
    least = min(number for number in numbers if number)
    if max(numbers) > MOST_APART * least:
        raise InputError(
            f"shares may be up to {MOST_APART:,} times as large as others, got {text!r}; a device "
            "that is to do nothing has the share 0"
        )
    return numbers


@dataclass(frozen=True)
class RankPlan:
    """What one of several ranks does.

    `group` counts the groups that make videos apart from each other; `weight` is its speed beside
    those of the others. `tokens` is the part (0..1) of one video's tokens that it holds,
    `attention` its part of what they are dealt out for in another way; `sent_bytes` leave it at
    each step, and `weight_bytes` of the weights that it keeps for others, of which it has a part as
    large as its `room` is beside theirs. `idle` says when it has nothing to do, empty if it always
    has; one that never `works` has no part in any video.
    """

    device: str
    group: int
    weight: float
    tokens: float = 1.0
    attention: float = 1.0
    sent_bytes: int = 0
    idle: str = ""
    weight_bytes: int = 0
    room: float = 1.0
    works: bool = True


@dataclass(frozen=True)
class ParallelPlan:
    """A run on several ranks: each rank's part, and how many videos each group makes.

    `cfg` is into how many parts the branches of guidance are dealt within each group, `way` how
    tokens are exchanged where a model has several ways, `num_threads` the CPU threads of each rank.
    `done` are the numbers of videos that were made before, by a run that was broken off; nobody
    makes them, and `videos` doesn't count them.
    """

    ranks: tuple[RankPlan, ...]
    videos: tuple[int, ...]
    cfg: int = 1
    num_threads: int = 1
    way: str = ""
    done: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, in order."""
        numbers = range(len(self.videos))
        return tuple(
            tuple(rank for rank, plan in enumerate(self.ranks) if plan.group == number)
            for number in numbers
        )

    @property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group that work."""
        return tuple(
            tuple(rank for rank in group if self.ranks[rank].works) for group in self.groups
        )

    @property
    def weights(self) -> tuple[float, ...]:
        """The speeds of all ranks."""
        return tuple(rank.weight for rank in self.ranks)

    def speaks(self, rank: int) -> bool:
        """Whether that rank's events count: it is the first of those that make the same videos.

        What comes before the first stage is told by rank 0 alone.
        """
        return any(group[0] == rank for group in self.groups)

    def takes(self, group: int) -> tuple[int, ...]:
        """Which of the videos that group makes."""
        ends = [0, *accumulate(self.videos)]
        everything = range(ends[-1] + len(self.done))
        left = [number for number in everything if number not in self.done]
        return tuple(left[ends[group] : ends[group + 1]])

    def __str__(self) -> str:
        sizes = sorted({len(team) for team in self.teams}, reverse=True)
        sequence = " or ".join(str(-(-size // self.cfg)) for size in sizes)
        way = self.way if sequence != "1" and self.way else "sequence"
        return f"data={len(self.videos)}, cfg={self.cfg}, {way}={sequence}"
