"""A group of ranks without a cluster: what is said of a rank that is gone."""

from __future__ import annotations

import pytest

from everyframe.engine.ray.group import _reason

_START = (
    "The actor died because of an error raised in its creation task, "
    "\x1b[36mray::RayRank.__init__()\x1b[39m (pid=1, ip=10.0.0.1, repr=<RayRank>)\n"
    '  File "/x/rank.py", line 7, in __init__\n'
    "OSError: [Errno 28] No space left on device: '/tmp/everyframe-ray-x/lock'"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (_START, "OSError: [Errno 28] No space left on device: '/tmp/everyframe-ray-x/lock'"),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: RayRank\n",
            "The actor died unexpectedly before finishing this task",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_of_a_loss_is_one_line_without_colours(text: str, reason: str) -> None:
    assert _reason(RuntimeError(text)) == reason
