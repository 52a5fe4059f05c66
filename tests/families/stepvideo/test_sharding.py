"""Step-Video's denoiser on several ranks, by heads and in a ring: the bytes that it sends.

What holds for every family is in `test_contract_distributed.py`.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from everyframe.parallel.communicator import FakeCommunicator
from helpers.sharded_denoisers.stepvideo import CONFIG, StepVideo


@pytest.mark.parametrize(("backend", "size"), [("ulysses", 3), ("ring", 3), ("ring", 6)])
def test_bytes_are_those_of_the_formula(backend: str, size: int) -> None:
    """Four units a block by heads, where a unit is tokens * width * bytes * (P - 1) / P^2."""
    tokens = 72
    unit = Fraction(tokens * CONFIG.hidden_size * 8 * (size - 1), size**2)
    wanted = {"ulysses": 4 * unit, "ring": 2 * unit * size}
    group = FakeCommunicator(0, (1.0,) * size)
    sent = StepVideo(backend).sharded(group, "sizes that divide")["sent"]
    last = sent.pop("the last projection is gathered")
    assert sum(sent.values()) == CONFIG.num_layers * wanted[backend]
    assert last == tokens // size * 4 * 8 * (size - 1)
