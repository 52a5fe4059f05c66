"""Certificates are found by whom they were made for, and by nobody else; damage is no crash."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.fast_paths import certificates
from everyframe.fast_paths.certificates import Certificate

pytestmark = pytest.mark.usefixtures("own_cache")

CARD = DeviceFacts("a card", "cuda", 0, 10**9, 10**9, (9, 0), True, True)
CPU = DeviceFacts("a processor", "cpu", None, 10**9, 10**9)
MADE = Certificate(
    "attention-flash", "denoiser", "device", "plan", "certified", "right, and faster",
    2e-7, 1e-5, 3.4, "2026-11-21",
)  # fmt: skip


def test_what_is_kept_is_found_and_replaced() -> None:
    assert certificates.find("device", "plan") == {}
    refused = replace(MADE, what="compile", verdict="refused", error=None, gain=None)
    certificates.keep([MADE, refused])
    certificates.keep([replace(MADE, gain=2.0)])
    found = certificates.find("device", "plan")
    assert found == {"attention-flash": replace(MADE, gain=2.0), "compile": refused}
    assert [file.suffix for file in (certificates.folder() / "device").iterdir()] == [".json"]


def test_another_drivers_certificate_is_not_used(tmp_path: Path) -> None:
    certificates.keep([MADE])
    assert certificates.find("other-device", "plan") == {}
    assert certificates.find("device", "other-plan") == {}
    # Not even where somebody copies the file to where it would be looked for.
    shutil.copytree(certificates.folder() / "device", certificates.folder() / "other-device")
    assert certificates.find("other-device", "plan") == {}


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"\xff\xfe", b"[]", b'{"schema": "another"}',
        b'{"schema": "everyframe.certificates/1", "certificates": 5}',
        b'{"schema": "everyframe.certificates/1", "certificates": [{"what": "attention-flash"}]}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_as_none(damage: bytes) -> None:
    certificates.keep([MADE])
    (file,) = (certificates.folder() / "device").iterdir()
    file.write_bytes(damage)
    assert certificates.find("device", "plan") == {}
    certificates.keep([MADE])
    assert certificates.find("device", "plan") == {"attention-flash": MADE}


@pytest.mark.parametrize(
    "wrong",
    [{"verdict": "splendid"}, {"gain": "1"}, {"packages": [1]}, {"reason": None}, {"later": 1}],
    ids=str,
)
def test_one_wrong_entry_does_not_hide_the_others(wrong: dict[str, object]) -> None:
    certificates.keep([MADE])
    (file,) = (certificates.folder() / "device").iterdir()
    whole = json.loads(file.read_text())
    whole["certificates"].append({**asdict(MADE), "what": "compile", **wrong})
    file.write_text(json.dumps(whole))
    assert list(certificates.find("device", "plan")) == ["attention-flash"]


def test_where_nothing_can_be_written_they_last_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("EVERYFRAME_CACHE", str(in_the_way / "below"))
    certificates.keep([MADE])
    assert certificates.find("device", "plan") == {"attention-flash": MADE}


def test_the_device_key_changes_with_whatever_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "driver": "570.1", "libraries": {"cublas": "12.8", "cudnn": "9.8"}, "torch": "2.13",
        "packages": {"diffusers": "0.42.0"}, "flags": {"avx2"}, "capability": "AVX2",
        "kernels": "these",
    }  # fmt: skip
    monkeypatch.setattr(certificates, "_driver", lambda: facts["driver"])
    monkeypatch.setattr(certificates, "_libraries", lambda: facts["libraries"])
    monkeypatch.setattr(certificates, "_torch_version", lambda: facts["torch"])
    monkeypatch.setattr(certificates, "package_versions", lambda: facts["packages"])
    monkeypatch.setattr(certificates, "processor_flags", lambda: facts["flags"])
    monkeypatch.setattr(certificates, "_torch_capability", lambda: facts["capability"])
    monkeypatch.setattr(certificates, "sources_digest", lambda: facts["kernels"])
    seen = {certificates.device_key(CARD, 4)}
    for name, value in (
        ("driver", "571.2"),
        ("libraries", {"cublas": "12.9", "cudnn": "9.8"}),
        ("libraries", {"cublas": "12.8", "cudnn": "9.9"}),
        ("torch", "2.14"),
        ("packages", {"diffusers": "0.43.0"}),
        ("packages", {"diffusers": "0.42.0", "transformers": "5.0"}),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(facts, name, value)
            seen.add(certificates.device_key(CARD, 4))
    for name, value in (
        ("flags", {"avx2", "avx512_bf16"}), ("capability", "DEFAULT"), ("kernels", "others"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setitem(facts, name, value)
            seen.add(certificates.device_key(CPU, 1))
    seen.add(certificates.device_key(replace(CARD, name="another card"), 4))
    seen.add(certificates.device_key(replace(CARD, capability=(8, 0)), 4))
    seen |= {certificates.device_key(CPU, threads) for threads in (1, 2)}
    assert len(seen) == 14
    # Threads of the host are nothing to a card, nor is what is free there now.
    assert certificates.device_key(replace(CARD, free_memory=5), 1) in seen


def test_the_plan_key_changes_with_model_and_precision() -> None:
    wide, narrow = Precision("float32", "float32"), Precision("bfloat16", "bfloat16", ("a",))
    seen = {
        certificates.plan_key("denoiser", wide, [("hidden 32", 16)]),
        certificates.plan_key("denoiser", wide, [("hidden 64", 16)]),
        certificates.plan_key("denoiser", wide, [("hidden 32", 32)]),
        certificates.plan_key("denoiser", narrow, [("hidden 32", 16)]),
        certificates.plan_key("denoiser", replace(narrow, islands=()), [("hidden 32", 16)]),
        certificates.plan_key("vae", wide, [("hidden 32", 16)]),
    }
    assert len(seen) == 6
