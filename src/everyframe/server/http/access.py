"""Access checks: API keys, the page's session cookie, and the Host and Origin headers.

Keys are stored as SHA-256 and compared in constant time. A session cookie is signed with a key in
the data folder: it stays valid over a restart, becomes invalid with its API key, and can't be
forged from a file of key hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass

from everyframe.server.errors import ApiError
from everyframe.server.settings import ApiKey, Role, ServerSettings

COOKIE = "everyframe_session"
#: Seconds for which a session cookie is good.
SESSION_SECONDS = 7 * 24 * 3600

#: Paths that need no key.
_OPEN = frozenset({"/health", "/ready", "/v1/session"})
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Principal:
    """The caller: the name of its key, empty on a server without keys, and its role."""

    name: str = ""
    role: Role = "admin"

    @property
    def owner(self) -> str | None:
        """Owner whose jobs it may see; None for all jobs."""
        return None if self.role == "admin" else self.name


class Access:
    """Access checks of one server; `session_key` signs its cookies."""

    def __init__(self, settings: ServerSettings, session_key: bytes) -> None:
        self._settings, self._session_key = settings, session_key
        self._keys = {key.name: key for key in settings.keys}

    def needs_caller(self, path: str) -> bool:
        """Whether a path is for callers who are known: not health, login and the page's files."""
        if path in _OPEN:
            return False
        if path == "/metrics":
            return not self._settings.has_open_metrics
        return path == "/v1" or path.startswith("/v1/")

    def check_host(self, host: str) -> None:
        """Raise `ApiError` for a Host header of another name, as DNS rebinding sends it."""
        if _host_name(host) not in self._settings.host_names:
            raise ApiError(
                "invalid_host",
                f"host {host[:80]!r} is not this server's; allow it with --allowed-hosts",
            )

    def check_origin(self, method: str, headers: Mapping[str, str]) -> None:
        """Raise `ApiError` for a modifying request from a page of another origin."""
        if method in _SAFE_METHODS:
            return
        origin = headers.get("origin")
        host = headers.get("host", "")
        own = (None, f"http://{host}", f"https://{host}")
        is_own = origin in own or origin in self._settings.cors_origins
        if not is_own or (origin is None and headers.get("sec-fetch-site") == "cross-site"):
            raise ApiError(
                "foreign_origin",
                f"origin {str(origin)[:80]!r} may not change anything here; allow it with "
                "--cors-origin",
            )

    def principal(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> Principal:
        """The caller of a request. Raises `ApiError` without a valid key or cookie."""
        if not self._keys:
            return Principal()
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and given:
            key = self.find_key(given.strip())
        else:
            key = self._of_session(cookies.get(COOKIE, ""))
        if key is None:
            text = "the key is wrong" if given or cookies.get(COOKIE) else "there is no key"
            raise ApiError(
                "invalid_api_key",
                f"{text}; send one as 'Authorization: Bearer KEY'",
                headers={"www-authenticate": "Bearer"},
            )
        return Principal(key.name, key.role)

    def find_key(self, given: str) -> ApiKey | None:
        """The API key that matches the text, else None; all are compared, in constant time."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for key in self._keys.values():
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return found

    def session_cookie(self, key: ApiKey) -> str:
        """A cookie's value for this key: name, time of its end, and their signature."""
        ends = str(int(time.time()) + SESSION_SECONDS)
        return f"{key.name}:{ends}:{self._signature(key, ends)}"

    def _of_session(self, cookie: str) -> ApiKey | None:
        name, _, rest = cookie.rpartition(":")[0].partition(":")
        signature = cookie.rpartition(":")[2]
        key = self._keys.get(name)
        if key is None or not rest.isdigit() or not signature.isascii():
            return None
        is_signed = hmac.compare_digest(signature, self._signature(key, rest))
        return key if is_signed and int(rest) > time.time() else None

    def _signature(self, key: ApiKey, ends: str) -> str:
        text = f"everyframe session {key.name} {key.sha256} {ends}".encode()
        return hmac.new(self._session_key, text, hashlib.sha256).hexdigest()


def _host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    host = header.strip().lower()
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdigit() else host
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name
