"""Profiles are facts with sources, and a file of one's own is checked like an option."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everyframe.core.errors import InputError
from everyframe.hardware.accelerators import has_fast_bf16, has_fast_fp16
from everyframe.hardware.known_issues import find
from everyframe.hardware.profiles import find_profile, machine_names, profile_names

NAMES = {
    "cpu-fp32", "cpu-bf16", "cuda-sm70", "cuda-sm75", "cuda-sm80", "cuda-sm86", "cuda-sm89",
    "cuda-sm90", "cuda-sm100", "cuda-sm120", "mps", "rocm",
}  # fmt: skip
OWN: dict[str, Any] = {
    "name": "my card",
    "kind": "cuda",
    "memory": 8_000_000_000,
    "capability": [8, 6],
    "has_fast_bf16": True,
    "rates": {"products": {"float32": 1e13, "bfloat16": 4e13}, "memory": 4e11},
}


def test_every_profile_of_the_plan_is_there() -> None:
    assert set(profile_names()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_profile_is_whole(name: str) -> None:
    profile = find_profile(name)
    assert profile.sources
    machine = profile.machine()
    device = machine.devices[0]
    assert machine.cpu is machine.devices[-1]
    assert 0 < device.free_memory <= device.memory
    assert device.rates is not None
    assert {"float32"} < set(dict(device.rates.products)) <= set(device.dtypes)
    assert "peak" in device.rates.source
    # The same rules as for a card that is here.
    if device.capability is not None:
        assert device.has_fast_bf16 == has_fast_bf16(device.capability)
        assert device.has_fast_fp16 == has_fast_fp16(device.capability)


def test_cuda_is_that_of_torch(tmp_path: Path) -> None:
    """The doctor said that a V100 was ready whose torch has no kernels for it."""
    for given, cuda in (
        ({"packages": {"torch": "2.13.0+cu130"}}, "13.0"),
        ({"packages": {"torch": "2.13.0+cu130"}, "cuda": "12.6"}, "12.6"),
        ({"packages": {"torch": "2.13.0+rocm6.4"}}, None),
    ):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps({**OWN, "capability": [7, 0], "software": given}))
        machine = find_profile(path).machine()
        assert machine.software is not None
        assert machine.software.cuda == cuda
        found = {match.issue.id for match in find(machine)}
        assert ("volta-pascal-dropped" in found) is (cuda == "13.0")


def test_apple_has_no_float64() -> None:
    assert "float64" not in find_profile("mps").machine().devices[0].dtypes


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN))
    device = find_profile(path).machine().devices[0]
    assert (device.name, device.torch_name, device.free_memory) == ("my card", "cuda:0", 8 * 10**9)
    assert device.rates is not None
    assert device.rates.product("bfloat16") == 2e13
    # Nobody measured it: as slow as the slowest.
    assert device.rates.product("float16") == 5e12


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "tpu"}, "kind must be one of cpu, cuda, mps, xpu, got 'tpu'"),
        ({"memory": "much"}, "memory must be a whole number, got 'much'"),
        ({"memory": 0}, "memory must be more than 0"),
        ({"host_memory": 10**400}, "host_memory must be at most"),
        ({"count": 10**9}, "count must be at most 256"),
        ({"like": ["cuda-sm80"]}, "like must be a device of cpu-fp32, "),
        ({"self": 1}, "self is no option"),
        ({"type": "doctor"}, "is a report of the doctor, which has no rates to plan a model by"),
        ({"dtypes": ["int4"]}, "dtypes are float64, float32, bfloat16, float16, got 'int4'"),
        ({"colour": "red"}, "colour is no option"),
        ({"rates": {"products": {}, "memory": 1.0}}, "rates.products must hold a rate"),
        # Beyond what seconds can be: a plan's would be infinite, which JSON has not.
        ({"rates": {"products": {"float32": 1e-300}, "memory": 1.0}}, "a rate of 1 or more"),
        ({"rates": {"products": {"float32": 1.0}, "memory": 1e-300}}, "memory must be at least 1"),
    ],
)
def test_a_wrong_file(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**OWN, **changes}))
    with pytest.raises(InputError) as error:
        find_profile(path)
    assert text in str(error.value)
    assert str(path) in str(error.value)


def test_what_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'rocm'\?; profiles: cpu-fp32"):
        find_profile("rocn")
    path = tmp_path / "broken.json"
    path.write_text("[1]")
    with pytest.raises(InputError, match="must be an object"):
        find_profile(path)
    for text in ("{", "[" * 10**5):
        path.write_text(text)
        with pytest.raises(InputError, match="no profile: it can't be read as JSON"):
            find_profile(path)


def test_profiles_need_no_torch() -> None:
    code = (
        "import sys; from everyframe.hardware.profiles import find_profile;"
        "find_profile('mps').machine(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MACHINES = {
    "v100-oneflow", "a100-oneflow", "a30-oneflow", "rtx2080ti-nexfort", "rtx4090-nexfort",
    "h20-cublas12.1", "h20-cublas12.5.2.13", "m1", "cpu", "3gpu-opensora",
    "4gpu-stepvideo",
}  # fmt: skip


def test_every_machine_of_the_doctor_is_there() -> None:
    assert set(machine_names()) == MACHINES


@pytest.mark.parametrize("name", sorted(MACHINES))
def test_a_machine_is_whole(name: str) -> None:
    profile = find_profile(name)
    machine = profile.machine()
    assert profile.sources
    assert machine.software is not None
    assert machine.versions["torch"] == machine.software.packages["torch"]
    device = machine.devices[0]
    assert 0 < device.free_memory <= device.memory
    assert device.rates is not None
    assert set(dict(device.rates.products)) <= set(device.dtypes)


def test_several_of_a_device() -> None:
    devices = find_profile("3gpu-opensora").machine().devices
    assert [device.torch_name for device in devices] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]


def test_what_an_entry_leaves_out_is_that_of_the_device_it_is_like(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "cuda-sm80", "memory": 10**9, "count": 2}))
    devices = find_profile(path).machine().devices
    assert (devices[1].capability, devices[1].memory) == ((8, 0), 10**9)
    path.write_text(json.dumps({"like": "cuda-sm81"}))
    with pytest.raises(InputError, match=r"got 'cuda-sm81'; did you mean 'cuda-sm8"):
        find_profile(path)
