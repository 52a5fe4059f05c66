"""The libraries that are really in a process, out of the kernel's list and their own word."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from everyframe.core.facts import SoftwareFacts
from everyframe.hardware import software
from everyframe.hardware.software import (
    dotted,
    loaded_files,
    software_facts,
    variables_that_matter,
    with_loaded,
)

MAPS = """
7f01-7f02 r-xp 00000000 08:01 11 /usr/local/cuda-12.1/lib64/libcublas.so.12.1.3.1
7f02-7f03 r--p 00001000 08:01 11 /usr/local/cuda-12.1/lib64/libcublas.so.12.1.3.1
7f03-7f04 r-xp 00000000 08:01 12 /venv/nvidia/cublas/lib/libcublas.so.12
7f04-7f05 r-xp 00000000 08:01 13 /venv/nvidia/cublas/lib/libcublasLt.so.12
7f05-7f06 r-xp 00000000 08:01 14 /venv/nvidia/cudnn/lib/libcudnn.so.9
7f06-7f07 r-xp 00000000 08:01 15 /venv/nvidia/cudnn/lib/libcudnn_ops.so.9
7f07-7f08 rw-p 00000000 00:00 0
7f08-7f09 r-xp 00000000 08:01 16 /a folder/with spaces/libnccl.so.2
"""


def test_files_of_the_list() -> None:
    assert loaded_files(MAPS) == {
        "cublas": [
            "/usr/local/cuda-12.1/lib64/libcublas.so.12.1.3.1",
            "/venv/nvidia/cublas/lib/libcublas.so.12",
        ],
        "cublaslt": ["/venv/nvidia/cublas/lib/libcublasLt.so.12"],
        "cudnn": ["/venv/nvidia/cudnn/lib/libcudnn.so.9"],
        "nccl": ["/a folder/with spaces/libnccl.so.2"],
    }


@pytest.mark.parametrize(
    ("number", "first", "version"),
    [(91002, 10000, "9.10.2"), (8907, 1000, "8.9.7"), (120103, 10000, "12.1.3")],
)
def test_numbers_as_versions(number: int, first: int, version: str) -> None:
    assert dotted(number, first) == version


def test_the_loaded_copy_counts_and_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"libcublas.so.12.1.3.1": "12.1.3", "libcublas.so.12": "12.6.4"}
    monkeypatch.setattr(software, "_maps", lambda: MAPS)
    monkeypatch.setattr(
        software,
        "_ASK",
        {"cublas": lambda path: versions[Path(path).name], "cudnn": lambda path: "9.1.0"},
    )
    listed = SoftwareFacts(system="linux", packages={"nvidia-cublas-cu12": "12.6.4.1"})
    facts = with_loaded(listed)
    assert facts.library("cublas") == "12.1.3"
    assert len(facts.copies["cublas"]) == 2
    assert set(facts.copies) == {"cublas"}
    assert listed.library("cublas") == "12.6.4.1"  # all that is known without looking


def test_variables_that_matter_hold_no_secret() -> None:
    given = {
        "ONEFLOW_MLIR_CSE": "1",
        "NCCL_P2P_DISABLE": "1",
        "PYTORCH_SECRET_TOKEN": "x",
        "EVERYFRAME_API_KEY": "x",
        "EDITOR": "vi",
        "LD_LIBRARY_PATH": "/opt",
    }
    assert list(variables_that_matter(given)) == [
        "LD_LIBRARY_PATH", "NCCL_P2P_DISABLE", "ONEFLOW_MLIR_CSE",
    ]  # fmt: skip


def test_packages_are_those_that_are_installed() -> None:
    packages = software_facts().packages
    assert {"torch", "diffusers", "transformers"} <= set(packages)
    assert "pytest" not in packages


@pytest.mark.parametrize(
    ("printed", "code", "driver"),
    [("550.127.05\n550.127.05\n", 0, "550.127.05"), ("", 0, None), ("no devices", 9, None)],
)
def test_the_driver_by_smi(
    printed: str, code: int, driver: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], code, printed, "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert software._driver_by_smi() == driver


def test_without_smi_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", run)
    assert software._driver_by_smi() is None
