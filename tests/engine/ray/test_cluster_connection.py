"""Addresses at which there is no cluster, which need no Ray to be refused."""

from __future__ import annotations

import socket
import sys
import time
from types import SimpleNamespace

import pytest

from everyframe.core.errors import InputError
from everyframe.engine.ray.cluster_connection import has_head, join_cluster


@pytest.mark.parametrize("address", ["foo", "ray://127.0.0.1:10001", "127.0.0.1:", ":6379", ""])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="ray-address must be auto, local or HOST:PORT, got"):
        join_cluster(address)


@pytest.mark.parametrize("is_in_environment", [False, True])
def test_an_address_where_nothing_answers_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, is_in_environment: bool
) -> None:
    """Ray would try it for minutes, and print each attempt."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    began = time.monotonic()
    with pytest.raises(InputError, match=rf"joined at '{address}' \(Connection refused\); start"):
        join_cluster("auto" if is_in_environment else address)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("address", ["127.0.0.1:99999", f"{'a' * 80}.invalid:6379"])
def test_an_address_that_can_not_be_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="no Ray cluster can be joined at"):
        join_cluster(address)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_head_that_answers_is_distinguished_from_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Ray itself is not asked: without its head it blocks."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        if is_there:
            one.listen()
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{one.getsockname()[1]}")
        ray = SimpleNamespace(get_runtime_context=lambda: context)
        monkeypatch.setitem(sys.modules, "ray", ray)
        assert has_head() == is_there
