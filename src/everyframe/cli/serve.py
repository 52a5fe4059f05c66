"""``everyframe serve``: serve videos over HTTP from a durable queue.

The server itself is `everyframe.server.process`; it imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Group

from everyframe.cli.executors import is_ray
from everyframe.cli.options import command, flag, run_flag
from everyframe.cli.tables import one_line
from everyframe.core.bytes import parse_bytes
from everyframe.core.errors import ExitCode, InputError, MissingPackageError
from everyframe.core.paths import expand_path
from everyframe.core.torch_import import check_docstrings

if TYPE_CHECKING:
    from everyframe.engine.workers.executor import Executor
    from everyframe.server.dispatch.dispatcher import DispatcherOptions
    from everyframe.server.process import StartupInfo
    from everyframe.server.settings import ServerSettings

_HELP = """Serve videos over HTTP: OpenAI's videos API, a durable queue and a web page.

Without options it serves the models on this disk to this machine alone. Jobs outlive the server:
after a restart each continues at its step. Ctrl-C or SIGTERM stops it in order.
"""

#: Packages of the extra.
_PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
_DURATION = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(ms|s|m|h|d|w)?")
_UNITS = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def serve(
    *,
    host: str | None = None,
    port: str | None = None,
    data_dir: str | None = None,
    executor: str = "workers",
    drain: str = "0s",
    **given: Any,
) -> int:
    """Serve until a signal; the exit code. `given` are the other flags by name."""
    check_docstrings()  # else each client would hear of it
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(
            f"serving needs {', '.join(missing)}: pip install 'everyframe[server]'"
        )
    from everyframe.server.process import ProcessOptions
    from everyframe.server.process import serve as run_server

    settings = _settings(
        host=host or os.environ.get("EVERYFRAME_HOST") or "127.0.0.1",
        port=_port(port or os.environ.get("EVERYFRAME_PORT") or "8000"),
        **given,
    )
    options = ProcessOptions(
        data_folder=None if data_dir is None else expand_path(data_dir, "data-dir"),
        dispatcher=_dispatcher_options(given),
        drain_seconds=parse_duration(drain, "drain"),
    )
    run_server(settings, options, _executor(executor, given), _announcer(settings))
    return int(ExitCode.DONE)


def _settings(host: str, port: int, **given: Any) -> ServerSettings:
    from everyframe.server.settings import Limits, ServerSettings, environment_keys, keys_of_file

    file, loras = given.get("api_keys"), given.get("loras") or os.environ.get("EVERYFRAME_LORAS")
    keys = keys_of_file(expand_path(file, "api-keys")) if file else environment_keys(os.environ)
    models = given.get("models") or os.environ.get("EVERYFRAME_MODELS", "").split(",")
    retention, queued = given.get("retention"), given.get("max_queue")
    limits = Limits()
    if given.get("max_upload") is not None:
        limits = replace(limits, body_bytes=parse_bytes(given["max_upload"], "max-upload"))
    if queued is not None:
        limits = replace(limits, queued=_count(queued, "max-queue") or None)
    return ServerSettings(
        host=host,
        port=port,
        models=_words(models),
        loras=None if not loras else _folder(loras, "loras"),
        keys=keys,
        is_open=bool(given.get("no_auth")),
        allowed_hosts=_words(given.get("allowed_hosts")),
        cors_origins=_words(given.get("cors_origin")),
        url_hosts=_words(given.get("allow_url_inputs")),
        limits=limits,
        has_sync=not given.get("no_sync"),
        plans_ahead=bool(given.get("plan_ahead")),
        has_open_metrics=bool(given.get("open_metrics")),
        has_traces=bool(given.get("traces")),
        retention_seconds=None if retention is None else parse_duration(retention, "retention"),
    )


def _dispatcher_options(given: Any) -> DispatcherOptions:
    from everyframe.server.dispatch.device_groups import parse_groups
    from everyframe.server.dispatch.dispatcher import DispatcherOptions

    least = {"warm_ahead": 0, "max_attempts": 1, "max_batch": 1}
    counts: Any = {
        name: _count(given[name], name.replace("_", "-"), number)
        for name, number in least.items()
        if given.get(name) is not None
    }
    return DispatcherOptions(
        groups=parse_groups(given.get("groups")),
        has_previews=not given.get("no_previews"),
        **counts,
    )


def _executor(kind: str, given: Any) -> Callable[[], Executor]:
    """Starter of the executor of that name."""
    address, keep_warm = given.get("ray_address"), given.get("keep_warm")
    timeout = given.get("place_timeout")
    on_cluster = is_ray(kind, address, timeout)
    place_seconds = parse_duration("60s" if timeout is None else timeout, "place-timeout")
    warm_seconds = parse_duration("10m" if keep_warm is None else keep_warm, "keep-warm")

    def start() -> Executor:
        if on_cluster:
            from everyframe.engine.ray.executor import ray_executor

            return ray_executor(address, place_timeout=place_seconds)
        from everyframe.engine.workers.warm_workers import WarmWorkers

        return WarmWorkers(warm_seconds, stop_seconds=5.0)

    return start


def _announcer(settings: ServerSettings) -> Callable[[StartupInfo], None]:
    def announce(started: StartupInfo) -> None:
        print(one_line(f"serving on {started.url}; data in {started.folder}"), flush=True)
        if started.num_queued:
            print(
                f"jobs of an earlier server: {started.num_queued}, of which "
                f"{started.num_recovered} were interrupted",
                flush=True,
            )
        if settings.is_open and not settings.keys and not settings.is_loopback:
            print("everybody who reaches this address may use it (--no-auth)", flush=True)

    return announce


def parse_duration(text: str, name: str) -> float:
    """Seconds of ``90``, ``90s``, ``5m``, ``2h`` or ``7d``; `name` is the option that holds it.

    Raises `InputError` for anything else.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None:
        raise InputError(f"{name} must be a time such as 30s, 5m, 2h or 7d, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def _port(text: str) -> int:
    number = _count(text, "port")
    if number > 65_535:
        raise InputError(f"port must be 0 to 65535, got {number}")
    return number


def _count(text: str, name: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= least):
        raise InputError(f"{name} must be a whole number, {least} or more, got {text!r}")
    return int(text)


def _words(given: Sequence[str] | None) -> tuple[str, ...]:
    """Values of a flag that may be repeated, each of which may be a list with commas."""
    words = (word.strip() for each in given or () for word in each.split(","))
    return tuple(word for word in words if word)


def _folder(text: str, name: str) -> Path:
    folder = expand_path(text, name)
    if not folder.is_dir():
        raise InputError(f"{name} must be a folder, and {str(folder)!r} is none")
    return folder


_ADDRESS, _JOBS, _ACCESS = (
    Group(name, sort_key=place)
    for place, name in enumerate(("Address and data", "Jobs", "Access and limits"))
)

COMMAND = command(
    serve,
    (
        flag("host", str, "Address to listen on; 127.0.0.1 by default, also EVERYFRAME_HOST.",
             group=_ADDRESS),
        flag("port", int, "Port to listen on; 8000 by default, 0 for any free one, also "
             "EVERYFRAME_PORT.", group=_ADDRESS),
        flag("data_dir", Path, "Folder of the queue, runs and videos; also EVERYFRAME_SERVER_DIR.",
             group=_ADDRESS),
        flag("retention", str, "Delete finished videos after this time, such as 7d; never by "
             "default.", group=_ADDRESS),
        flag("models", list, "Model that clients may ask for, NAME or NAME=FOLDER; may be "
             "repeated; by default those on this disk.", group=_JOBS, word="NAME"),
        flag("loras", Path, "Folder of LoRAs that clients may name; also EVERYFRAME_LORAS.",
             group=_JOBS),
        flag("groups", str, "Devices that work together, group by group, such as 0,1;2,3.",
             group=_JOBS),
        flag("keep_warm", str, "Keep a model loaded for this time after its last job; 10m by "
             "default.", group=_JOBS),
        flag("warm_ahead", int, "Jobs in a row that may go first because their model is loaded; 4 "
             "by default.", group=_JOBS),
        flag("max_batch", int, "Jobs of one plan that a group runs together where that pays; 4 by "
             "default, 1 for one by one.", group=_JOBS),
        flag("max_attempts", int, "Failed attempts in a row, without a step between, after which a "
             "job fails; 3 by default.", group=_JOBS),
        flag("plan_ahead", bool, "Plan the first model's default video at the start, so that no "
             "request waits for it.", group=_JOBS),
        flag("no_previews", bool, "Make no pictures while a video is made.", group=_JOBS),
        flag("drain", str, "Time that running jobs have to finish when the server stops; 0s by "
             "default: they stop at once and continue after the restart.", group=_JOBS),
        flag("executor", str, "Where jobs run: workers of this machine, or ray.", group=_JOBS),
        flag("ray_address", str, "Address of the Ray cluster; auto by default.", group=_JOBS),
        flag("place_timeout", str, "Time that a job waits for free devices of the cluster; 60s by "
             "default.", group=_JOBS),
        flag("api_keys", Path, "File of keys, a line NAME SHA256 [user or admin] each; also "
             "EVERYFRAME_API_KEYS.", group=_ACCESS),
        flag("no_auth", bool, "Serve other machines without keys.", group=_ACCESS),
        flag("allowed_hosts", list, "Further name in the Host header; may be repeated.",
             group=_ACCESS, word="HOST"),
        flag("cors_origin", list, "Origin whose pages may call the API; may be repeated.",
             group=_ACCESS, word="ORIGIN"),
        flag("allow_url_inputs", list, "Host from which clients may name pictures by URL; may be "
             "repeated.", group=_ACCESS, word="HOST"),
        flag("max_upload", str, "Largest body of a request; 64MiB by default.", group=_ACCESS),
        flag("max_queue", int, "Most jobs that wait, 0 for any number; 50 by default.",
             group=_ACCESS),
        flag("no_sync", bool, "Leave out /v1/videos/sync.", group=_ACCESS),
        flag("open_metrics", bool, "Show /metrics without a key.", group=_ACCESS),
        flag("traces", bool, "Send spans by OpenTelemetry.", group=_ACCESS),
        run_flag("log_level"),
    ),
    _HELP,
)  # fmt: skip
