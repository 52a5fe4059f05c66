"""What a first run spends on certificates: some seconds, however many parts and paths there are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everyframe.core.facts import DeviceFacts
from everyframe.core.plan import Precision
from everyframe.fast_paths import certificates as certificate_store
from everyframe.fast_paths.certification import certify as certifies
from everyframe.fast_paths.certification.certify import CertifyResult, certify
from everyframe.fast_paths.certification.target import CertificationTarget
from everyframe.planning.fast_paths.component_certificates import (
    AT_ONCE,
    IN_ALL,
    MissingCertificates,
    make,
)
from helpers import fake_fast_paths

WHOLE = Precision("float32", "float32")
CPU = DeviceFacts("a processor", "cpu", None, 10**9, 10**9)


class Certificates:
    """Of parts that have nothing but a name."""

    def subject(self, component: str, precision: Precision, runs: Any) -> CertificationTarget:
        return CertificationTarget(component, CPU, 1, precision, component, "device")


def test_a_first_run_spends_no_more_than_its_seconds_on_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERYFRAME_CACHE", str(tmp_path))
    made: list[CertifyResult] = []

    def certified(*given: Any) -> CertifyResult:
        made.append(certify(*given))
        return made[-1]

    monkeypatch.setattr(certifies, "certify", certified)
    right, long = (fake_fast_paths.planted(name) for name in ("right", "long"))
    missing = [
        MissingCertificates("a", WHOLE, (right, long)),
        MissingCertificates("b", WHOLE, (right,)),
    ]
    certificates: Any = Certificates()
    untried = make(certificates, missing, (), 1.0)
    # A trial looks at the clock between two rounds, of twenty milliseconds here.
    assert 1.0 <= sum(each.tried_seconds for each in made) < 2.0
    # What was done is kept, the rest has its turn the next time.
    assert [*certificate_store.find("device", "a")] == ["right"]
    assert untried["a long"] == "there was no time to try it"
    assert certificate_store.find("device", "b") == {}
    assert AT_ONCE <= 3
    assert IN_ALL <= 30


def test_the_component_with_the_most_work_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time may be over before its turn: a small text encoder must not take it."""
    tried: list[str] = []

    def certify(subject: Any, paths: Any, seconds: float) -> CertifyResult:
        tried.append(subject.component)
        return CertifyResult((), {}, 0.0)

    monkeypatch.setattr(certifies, "certify", certify)
    right = fake_fast_paths.planted("right")
    missing = [MissingCertificates(name, WHOLE, (right,)) for name in ("small", "large", "middle")]
    work = {"small": 1.0, "middle": 2.0, "large": 3.0}
    runs: Any = [
        SimpleNamespace(
            stage_call=SimpleNamespace(component=name, num_calls=1),
            found=SimpleNamespace(work=SimpleNamespace(operations=each)),
        )
        for name, each in work.items()
    ]
    certificates: Any = Certificates()
    make(certificates, missing, runs, 1.0)
    assert tried == ["large", "middle", "small"]
