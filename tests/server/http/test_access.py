"""Keys, roles, hosts, origins and sessions: who may ask, and for what."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [server] is not installed")

from everyframe.core.errors import InputError
from everyframe.server.http import access
from everyframe.server.http.access import COOKIE, Access
from everyframe.server.settings import ServerSettings, keys_of_file, keys_of_variable
from helpers.server_app import ADDRESS, ServedApp, key

KEYS = (key("ann", "secret-a"), key("bob", "secret-b"), key("root", "secret-r", "admin"))


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server", keys=KEYS) as app:
        yield app


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[ServedApp]:
    with ServedApp(tmp_path / "server") as app:
        yield app


def create(app: ServedApp, **headers: str) -> Any:
    return app.client.post("/v1/videos", json={"prompt": "a red circle"}, headers=headers)


def test_another_host_needs_keys() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "example.org", "::"):
        with pytest.raises(InputError, match="--no-auth"):
            ServerSettings(host=host)
        ServerSettings(host=host, is_open=True)
        ServerSettings(host=host, keys=KEYS)
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        assert ServerSettings(host=host).is_loopback


def test_a_key_is_asked_for(guarded: ServedApp) -> None:
    for headers in ({}, bearer("secret-x"), bearer(""), {"authorization": "Basic secret-a"}):
        for path in ("/v1/videos", "/v1/models", "/v1/system", "/v1/nothing", "/metrics"):
            answer = guarded.client.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert guarded.client.get("/v1/videos", headers=bearer("secret-a")).status_code == 200
    for path in ("/health", "/ready"):
        assert guarded.client.get(path).status_code == 200


def test_a_key_of_others_sees_nothing_of_a_job(guarded: ServedApp) -> None:
    video = create(guarded, **bearer("secret-a")).json()["id"]
    for method, path in (
        ("GET", ""), ("GET", "/content"), ("GET", "/events"), ("DELETE", ""), ("POST", "/cancel"),
        ("POST", "/retry"), ("POST", "/remix"),
    ):  # fmt: skip
        answer = guarded.client.request(
            method, f"/v1/videos/{video}{path}", headers=bearer("secret-b")
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
    bobs = guarded.client.get("/v1/videos", headers=bearer("secret-b")).json()["data"]
    queue = guarded.client.get("/v1/queue", headers=bearer("secret-b")).json()
    assert (bobs, queue["data"], queue["counts"]["queued"]) == ([], [], 0)
    cursor = guarded.client.get(f"/v1/videos?after={video}", headers=bearer("secret-b"))
    assert cursor.status_code == 400
    assert guarded.client.get(f"/v1/videos/{video}", headers=bearer("secret-r")).status_code == 200


def test_keys_are_stored_and_compared_as_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    settings = ServerSettings(keys=KEYS)
    assert "secret-a" not in repr(settings)
    found = Access(settings, b"a key").find_key("secret-a")
    assert found is not None
    assert found.name == "ann"
    assert [other for _, other in compared] == [each.sha256 for each in KEYS], "each, and no break"


def test_keys_are_read_from_variable_and_file(tmp_path: Path) -> None:
    read = keys_of_variable("ann:secret-a, bob:secret-b:admin")
    assert [(each.name, each.role) for each in read] == [("ann", "user"), ("bob", "admin")]
    assert read[0].sha256 == hashlib.sha256(b"secret-a").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# ours\nann {read[0].sha256}\nbob {read[1].sha256} admin\n")
    assert keys_of_file(file) == read
    for text, words in (
        ("secret", "NAME:KEY"),
        ("a:x:boss", "user or admin"),
        ("a:x:secret", "user or admin"),
        ("a:sec:ret:secret", "without colon"),
        ("no secret:x", "letters, digits"),
        ("a:x,a:y", "twice"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            keys_of_variable(text)
        assert "secret" not in str(caught.value), "a message shows no key"
    file.write_text("ann secret-a\n")
    with pytest.raises(InputError, match="SHA-256"):
        keys_of_file(file)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]:8000",
     "localhost.evil.example", "127.0.0.1@evil.example",
     "[::1]evil.example", "[::1"],
)  # fmt: skip
def test_another_name_in_the_host_header_is_refused(bare: ServedApp, host: str) -> None:
    """DNS rebinding: a page's own name, resolved to this machine."""
    for path in ("/v1/videos", "/health", "/"):
        answer = bare.client.get(path, headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_host")


def test_own_names_in_the_host_header_are_served(tmp_path: Path) -> None:
    with ServedApp(tmp_path / "server", allowed_hosts=("video.lan",)) as app:
        for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "VIDEO.lan:443"):
            assert app.client.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{"origin": "https://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
     {"origin": "http://127.0.0.1:9000"}],
)  # fmt: skip
def test_pages_of_other_origins_change_nothing(bare: ServedApp, headers: dict[str, str]) -> None:
    answer = create(bare, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert bare.store.list() == []
    assert create(bare, origin=ADDRESS).status_code == 200
    assert "access-control-allow-origin" not in bare.client.get("/v1/videos").headers


def test_listed_origins_may_ask(tmp_path: Path) -> None:
    page = "https://page.example"
    with ServedApp(tmp_path / "server", cors_origins=(page,)) as app:
        answer = create(app, origin=page)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page)
        assert create(app, origin="https://evil.example").status_code == 403
    for origin in ("*", "https://*.example", "page.example", "https://page.example/x"):
        with pytest.raises(InputError, match="exact origin"):
            ServerSettings(cors_origins=(origin,))


def test_a_page_logs_in_with_a_cookie(guarded: ServedApp) -> None:
    assert guarded.client.post("/v1/session", json={"key": "wrong"}).status_code == 401
    assert guarded.client.post("/v1/session", json={}).status_code == 400
    answer = guarded.client.post("/v1/session", json={"key": "secret-a"})
    assert (answer.status_code, answer.json()["name"]) == (200, "ann")
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/"))
    assert "secret-a" not in cookie
    assert guarded.client.get("/v1/videos").status_code == 200
    guarded.client.delete("/v1/session")
    assert guarded.client.get("/v1/videos").status_code == 401


def test_a_cookie_can_not_be_forged(guarded: ServedApp, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = guarded.context.access
    good = checks.session_cookie(KEYS[0])
    name, ends, signature = good.split(":")
    assert checks.principal({}, {COOKIE: good}).name == "ann"
    for forged in (f"root:{ends}:{signature}", f"{name}:{int(ends) + 1}:{signature}", "", ":::",
                   f"{name}:{ends}:{signature[:-1]}é", f"{name}:x:{signature}"):  # fmt: skip
        with pytest.raises(access.ApiError):
            checks.principal({}, {COOKIE: forged})
    monkeypatch.setattr(access.time, "time", lambda: float(ends) + 1)
    with pytest.raises(access.ApiError):
        checks.principal({}, {COOKIE: good})


def test_a_hash_of_a_key_makes_no_cookie(guarded: ServedApp, tmp_path: Path) -> None:
    """Hashes may be read by more people than keys: a file of them is made so that it can be."""
    good = guarded.context.access.session_cookie(KEYS[0])
    elsewhere = Access(guarded.settings, b"another server's key")
    with pytest.raises(access.ApiError):
        guarded.context.access.principal({}, {COOKIE: elsewhere.session_cookie(KEYS[0])})
    place = tmp_path / "server" / "session-key"
    assert place.stat().st_mode & 0o077 == 0
    after_a_restart = Access(guarded.settings, guarded.folder.session_key())
    assert after_a_restart.principal({}, {COOKIE: good}).name == "ann"
    changed = ServerSettings(keys=(key("ann", "secret-new"),))
    with pytest.raises(access.ApiError):
        Access(changed, guarded.folder.session_key()).principal({}, {COOKIE: good})


def test_answers_carry_their_headers(bare: ServedApp) -> None:
    headers = bare.client.get("/health").headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "unsafe-inline" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-request-id"].startswith("req_")


def test_only_an_admin_goes_ahead(guarded: ServedApp) -> None:
    def ask(text: str, priority: object) -> Any:
        body = {"prompt": "a red circle", "priority": priority}
        return guarded.client.post("/v1/videos", json=body, headers=bearer(text))

    answer = ask("secret-a", 1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    first = ask("secret-a", -1).json()["id"]
    ahead = ask("secret-r", "1").json()
    assert ahead["queue_position"] == 0
    assert (
        guarded.client.get(f"/v1/videos/{first}", headers=bearer("secret-a")).json()[
            "queue_position"
        ]
        == 1
    )
    assert ask("secret-r", "high").status_code == 400


def test_without_keys_everybody_is_an_admin(tmp_path: Path) -> None:
    """Also of the videos that were made while there were keys."""
    with ServedApp(tmp_path / "server", keys=KEYS) as app:
        video = create(app, **bearer("secret-a")).json()["id"]
    with ServedApp(tmp_path / "server") as app:
        assert [row["id"] for row in app.client.get("/v1/videos").json()["data"]] == [video]
        assert app.client.get("/v1/queue").json()["counts"]["queued"] == 1
        ahead = app.client.post("/v1/videos", json={"prompt": "a red circle", "priority": 1})
        assert ahead.json()["queue_position"] == 0
        assert app.client.delete(f"/v1/videos/{video}").json()["deleted"]
