"""Settings of the server: address, access, limits and models. `cli/serve.py` fills them."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from everyframe.core.errors import InputError

Role = Literal["user", "admin"]
ROLES: tuple[Role, ...] = ("user", "admin")

#: Environment variable: keys as ``NAME:KEY`` or ``NAME:KEY:ROLE``, separated by commas.
KEYS_VARIABLE = "EVERYFRAME_API_KEYS"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MIB = 1024**2


@dataclass(frozen=True)
class ApiKey:
    """A key by its SHA-256, in hexadecimal; the key itself is not stored.

    A `user` sees its own jobs, an `admin` all of them.
    """

    name: str
    sha256: str
    role: Role = "user"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"a key's name must be up to 64 letters, digits, dots or dashes, got {self.name!r}"
            )
        if not _DIGEST.fullmatch(self.sha256):
            raise InputError(f"key {self.name}: the second word must be a SHA-256 in hexadecimal")
        if self.role not in ROLES:
            raise InputError(f"key {self.name}: role must be user or admin, got {self.role!r}")


def keys_of_variable(text: str) -> tuple[ApiKey, ...]:
    """Keys of `KEYS_VARIABLE`. Raises `InputError` for another form, without quoting any of it.

    What stands in the place of a name or a role may be a part of a key.
    """
    keys = []
    for place, entry in enumerate(filter(None, (each.strip() for each in text.split(","))), 1):
        name, _, rest = entry.partition(":")
        key, _, role = rest.partition(":")
        if not (_NAME.fullmatch(name) and key and role in ("", *ROLES)):
            raise InputError(
                f"{KEYS_VARIABLE}: entry {place} must be NAME:KEY or NAME:KEY:ROLE, with a name of "
                "up to 64 letters, digits, dots or dashes, a key without colon and comma, and user "
                "or admin as role"
            )
        digest = hashlib.sha256(key.encode()).hexdigest()
        keys.append(ApiKey(name, digest, role or "user"))  # type: ignore[arg-type]
    return _distinct(keys)


def keys_of_file(path: Path) -> tuple[ApiKey, ...]:
    """Keys of a file with a line ``NAME SHA256 [ROLE]`` each; ``#`` begins a comment.

    Raises:
        InputError: the file can't be read, or a line has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file of keys {str(path)!r} can't be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) not in (2, 3):
            raise InputError(f"{path.name}, line {number}: must be NAME SHA256 [user or admin]")
        keys.append(ApiKey(*words))  # type: ignore[arg-type]
    return _distinct(keys)


def _distinct(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    found: dict[str, ApiKey] = {}
    for key in keys:
        if key.name in found:
            raise InputError(f"key {key.name} is listed twice; give each key a name of its own")
        found[key.name] = key
    return tuple(found.values())


@dataclass(frozen=True)
class Limits:
    """Limits on what clients send.

    Attributes:
        body_bytes: bytes of a request's body.
        num_files: files of a multipart body; `num_fields`: its fields.
        field_bytes: bytes of one text field of a multipart body.
        prompt_letters: characters of a prompt or a negative prompt.
        picture_pixels: pixels of a picture, by its header.
        video_bytes: bytes of a video; `video_seconds`: its length.
        queued: queued jobs; None for no limit.
        queued_of_key: queued jobs of one key; None for no limit.
        creations_a_minute: jobs and plans that one key may request per minute; None for no limit.
        body_seconds: longest pause within a body, and the time for 512 KiB of it on average.
        header_seconds: time for the headers of a request; `header_bytes`: their size.
        event_streams: open event streams; `event_streams_of_key`: those of one key.
    """

    body_bytes: int = 64 * _MIB
    num_files: int = 4
    num_fields: int = 64
    field_bytes: int = _MIB
    prompt_letters: int = 32_000
    picture_pixels: int = 64_000_000
    video_bytes: int = 512 * _MIB
    video_seconds: float = 60.0
    queued: int | None = 50
    queued_of_key: int | None = 10
    creations_a_minute: int | None = 30
    body_seconds: float = 20.0
    header_seconds: float = 20.0
    header_bytes: int = 64 * 1024
    event_streams: int = 200
    event_streams_of_key: int = 50


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        models: names, folders or hub ids that clients may request, also as ``NAME=TARGET``; the
            first is the default. Empty: every known model on this disk.
        loras: folder of LoRA files that clients may name; None for no LoRAs.
        keys: API keys; without any, everyone has access, allowed on loopback or with `is_open`.
        is_open: serve other machines without keys.
        allowed_hosts: further names in the Host header, beside loopback's and `host`.
        cors_origins: exact origins whose pages may call the API.
        url_hosts: hosts from which clients may name pictures and videos by URL; none by default.
        has_sync: whether ``/v1/videos/sync`` exists.
        has_open_metrics: whether ``/metrics`` needs no key.
        plans_ahead: whether the default model is planned at startup.
        has_traces: whether spans are sent by OpenTelemetry.
        retention_seconds: time until a job that ended is deleted; None for never.
        min_free_bytes: room on the disk below which the server is not ready.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    models: tuple[str, ...] = ()
    loras: Path | None = None
    keys: tuple[ApiKey, ...] = ()
    is_open: bool = False
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    url_hosts: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    has_sync: bool = True
    has_open_metrics: bool = False
    plans_ahead: bool = False
    has_traces: bool = False
    retention_seconds: float | None = None
    min_free_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.keys and not self.is_open:
            raise InputError(
                f"host {self.host} is reachable from other machines, and there are no keys; set "
                f"{KEYS_VARIABLE} or --api-keys FILE, or say --no-auth"
            )
        for origin in self.cors_origins:
            if not re.fullmatch(r"https?://[^/*\s]+", origin):
                raise InputError(
                    "cors-origin must be an exact origin such as https://example.org, got "
                    f"{origin!r}"
                )

        _check_hosts("allowed-hosts", self.allowed_hosts)
        _check_hosts("allow-url-inputs", self.url_hosts)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def host_names(self) -> frozenset[str]:
        """Host names that requests may carry, in lower case."""
        own = {"localhost", "127.0.0.1", "::1", self.host, *self.allowed_hosts}
        return frozenset(name.strip("[]").lower() for name in own)

    @property
    def limits_keys(self) -> bool:
        """Whether limits per key apply: not on loopback without keys."""
        return bool(self.keys) or not self.is_loopback

    @property
    def queue_limits(self) -> tuple[int | None, int | None]:
        """Most queued jobs, and most of one key; None for no limit."""
        own = self.limits.queued_of_key if self.limits_keys else None
        return self.limits.queued, own


def _check_hosts(flag: str, hosts: Iterable[str]) -> None:
    """Raise `InputError` for what equals no host's name in a request: one with scheme or port."""
    for host in hosts:
        if not (re.fullmatch(r"[\w.-]+", host) or _address(host)):
            raise InputError(
                f"{flag} must be a name or an address such as example.org, without scheme and "
                f"port, got {host!r}"
            )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def environment_keys(environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Keys of the environment, if there are any. Raises `InputError` for another form."""
    return keys_of_variable(environment.get(KEYS_VARIABLE, ""))
