"""Facts of this machine against what the system itself tells, and which device a request means."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

from everyframe.core.errors import InputError
from everyframe.core.facts import DeviceFacts, MachineFacts
from everyframe.hardware import machine_facts, pick_device
from everyframe.hardware.facts import _PACKAGES

GIB = 1 << 30
CPU = DeviceFacts("Some CPU", "cpu", None, 16 * GIB, 8 * GIB)


def card(index: int) -> DeviceFacts:
    return DeviceFacts("Some card", "cuda", index, 8 * GIB, 7 * GIB, (8, 6), True, True)


TWO_CARDS = MachineFacts((card(0), card(1), CPU), num_cores=4)
NO_CARD = MachineFacts((CPU,), num_cores=4)
APPLE = MachineFacts((DeviceFacts("Apple GPU", "mps", None, 8 * GIB, 7 * GIB), CPU), num_cores=4)


def test_the_cpu_is_always_there_and_last() -> None:
    facts = machine_facts()
    assert facts.devices[-1] is facts.cpu
    assert facts.cpu.torch_name == "cpu"


def test_numbers_agree_with_the_system() -> None:
    facts = machine_facts("cpu")
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < facts.cpu.free_memory <= facts.cpu.memory <= installed
    assert 1 <= facts.num_cores <= (os.cpu_count() or 1)
    assert facts.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "diffusers", "transformers"} <= set(facts.versions)
    installed_ones = {name for name in _PACKAGES if find_spec(name)}
    assert facts.versions.keys() == {"python", "system"} | installed_ones


def test_facts_are_plain_data() -> None:
    assert machine_facts("cpu").to_json()["devices"][-1]["kind"] == "cpu"


@pytest.mark.parametrize(
    ("facts", "asked", "found"),
    [
        (TWO_CARDS, "auto", "cuda:0"),
        (TWO_CARDS, "cuda", "cuda:0"),
        (TWO_CARDS, "cuda:1", "cuda:1"),
        (TWO_CARDS, "CPU", "cpu"),
        (NO_CARD, "auto", "cpu"),
        (NO_CARD, "cpu:0", "cpu"),
        (APPLE, "mps", "mps"),
        (APPLE, "mps:0", "mps"),  # as torch calls it in tensor.device
    ],
)
def test_the_device_that_was_meant(facts: MachineFacts, asked: str, found: str) -> None:
    assert pick_device(facts, asked).torch_name == found


@pytest.mark.parametrize(
    ("facts", "asked", "message"),
    [
        (TWO_CARDS, "cuda:3", r"'cuda:3'.*has 2 of cuda.*cuda:0 \(Some card\), cuda:1 .*, cpu"),
        (NO_CARD, "cuda", r"'cuda'.*torch finds none.*cpu \(Some CPU\)"),
        (NO_CARD, "mps", "torch finds none"),
        (APPLE, "mps:1", "has 1 of mps, counted from 0"),
        (NO_CARD, "xpu:0", "'xpu:0' is an Intel GPU, and those aren't supported yet; give auto or"),
        (TWO_CARDS, "gpu", r"'gpu' is not a device; give auto or .*cuda:0"),
        (TWO_CARDS, "cuda:x", "is not a device"),
    ],
)
def test_a_device_that_is_not_there(facts: MachineFacts, asked: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pick_device(facts, asked)


def test_asking_for_the_cpu_does_not_import_torch() -> None:
    import subprocess

    code = (
        "import sys; from everyframe.hardware import machine_facts;"
        "machine_facts('cpu'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
