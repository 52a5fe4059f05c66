"""The server's process: build its parts, listen on a socket, and drain on a signal.

SIGTERM, Ctrl-C or a closed terminal (SIGHUP, unless ignored) drains the server: no job begins,
new jobs are refused and event streams end. Running jobs get `drain_seconds` to finish and are then
queued again with their run. A second signal ends that wait.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import uvicorn

from everyframe.core.errors import InputError
from everyframe.engine.workers.executor import Executor
from everyframe.server.data_folder import open_folder
from everyframe.server.dispatch.dispatcher import Dispatcher, DispatcherOptions
from everyframe.server.http.app import create_app
from everyframe.server.http.request_heads import limited_protocol
from everyframe.server.queue.store import JobStore
from everyframe.server.settings import ServerSettings

#: Seconds that open connections have to end once the server stops. Without a limit one open event
#: stream would keep it for ever.
_GRACE_SECONDS = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class ProcessOptions:
    """What a server's process needs beside `ServerSettings`.

    Attributes:
        data_folder: None for the default one.
        dispatcher: how jobs are run.
        drain_seconds: time that running jobs have to finish when the server stops.
    """

    data_folder: Path | None = None
    dispatcher: DispatcherOptions = field(default_factory=DispatcherOptions)
    drain_seconds: float = 0.0


@dataclass(frozen=True)
class StartupInfo:
    """Address, data folder and waiting jobs of a server that has started.

    Attributes:
        num_recovered: jobs that were running when an earlier server died.
        num_queued: all waiting jobs, recovered ones included.
    """

    url: str
    folder: Path
    num_recovered: int
    num_queued: int


def serve(
    settings: ServerSettings,
    options: ProcessOptions,
    make_executor: Callable[[], Executor],
    on_start: Callable[[StartupInfo], None],
) -> None:
    """Serve until a signal; `on_start` is called once requests are answered.

    Raises:
        InputError: the address or the data folder can't be used.
        RunLockedError: another server uses the data folder.
        StoreError: the queue can't be read or written.
    """
    with ExitStack() as stack:
        folder = open_folder(options.data_folder)
        stack.callback(folder.close)
        listening = stack.enter_context(bind(settings.host, settings.port))
        store = JobStore(folder, settings.retention_seconds)
        stack.callback(store.close)
        executor = make_executor()
        stack.callback(executor.close)
        dispatcher = Dispatcher(store, executor, options.dispatcher)
        stack.callback(dispatcher.drain)
        app = create_app(store, dispatcher, executor, settings)
        num_queued = store.count()["queued"]
        back = dispatcher.start()
        url = _url(settings.host, listening)
        started = StartupInfo(url, folder.path, len(back), num_queued + len(back))
        drain = _Drain(dispatcher, app.state.context.begin_drain, options.drain_seconds)
        server = _Server(_config(app, settings), lambda: on_start(started))
        with drain.on_signals(server):
            server.run(sockets=[listening])


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at that address; port 0 is any free one.

    Raises `InputError` if the address can't be used.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, address = found[0][0], found[0][4]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # Python adds the address to the system's words, except where it could not be looked up.
        known = error.errno is not None and not isinstance(error, socket.gaierror)
        why = os.strerror(error.errno) if known and error.errno else error.strerror
        raise InputError(
            f"the server can't listen on {host} port {port} ({why}); give another --host or "
            "--port, or --port 0 for any that is free"
        ) from error


def _url(host: str, listening: socket.socket) -> str:
    shown = f"[{host.strip('[]')}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"


def _config(app: object, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=limited_protocol(settings.limits),
        timeout_graceful_shutdown=_GRACE_SECONDS,
        # Clients that poll come every five seconds at the latest.
        timeout_keep_alive=30,
        log_config=None,
        access_log=False,
        server_header=False,
        # Clients' addresses are those of their connections: no proxy's header is believed.
        proxy_headers=False,
        lifespan="on",
        ws="none",
    )


class _Server(uvicorn.Server):
    """Uvicorn's server, with signals left to `_Drain` and a callback at startup."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_Drain`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What is there now stays until the end, and to look through it for garbage takes a
            # tenth of a second in which nobody is answered.
            gc.collect()
            gc.freeze()
            self._on_start()


class _Drain:
    """Drains a server on a signal."""

    def __init__(self, dispatcher: Dispatcher, begin: Callable[[], None], seconds: float) -> None:
        self._dispatcher = dispatcher
        self._begin = begin
        self._seconds = seconds
        self._thread: threading.Thread | None = None
        self._is_urgent = False

    @contextmanager
    def on_signals(self, server: uvicorn.Server) -> Iterator[None]:
        """Context: the first signal drains the server, a second one ends the wait."""

        def run() -> None:
            self._dispatcher.drain(self._seconds)
            server.should_exit = True

        def handle(number: int, frame: FrameType | None) -> None:
            if self._thread is None:
                self._begin()
                self._thread = threading.Thread(target=run, name="drain")
                self._thread.start()
            elif not self._is_urgent:
                self._is_urgent = True
                self._dispatcher.stop_now()

        before = {number: signal.signal(number, handle) for number in _draining_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _draining_signals() -> tuple[signal.Signals, ...]:
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return _SIGNALS
    return (*_SIGNALS, hangup)
