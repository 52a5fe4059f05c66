"""The SQLite file of the queue: schema, connections and transactions.

The file has a write-ahead log with ``synchronous=FULL``, so a durable transaction survives a power
cut. A transaction that may be lost does not wait for the disk: it survives the death of the
process, and a power cut loses it only together with everything written after it. Only one process
uses the file (the data folder is locked), so writers wait for a lock of that process and never for
SQLite's, which polls.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everyframe.core.errors import StoreError

#: Schema number of the file, as SQLite's ``user_version``.
VERSION = 1
#: Most bytes of a file's path, links resolved, that SQLite opens with a write-ahead log.
_LONGEST_PATH = 504
#: SQLite knows RETURNING since then.
_OLDEST_SQLITE = (3, 35)

#: In SQLite's error for a full disk; Python 3.10 has no error's number.
_SAYS_FULL = "disk is full"

_SCHEMA = """
CREATE TABLE videos(
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  status TEXT NOT NULL
    CHECK (status IN ('queued', 'in_progress', 'completed', 'failed', 'cancelled')),
  priority INTEGER NOT NULL,
  owner TEXT NOT NULL,
  model TEXT NOT NULL,
  "group" TEXT,
  created_at REAL NOT NULL,
  started_at REAL,
  completed_at REAL,
  expires_at REAL,
  attempts INTEGER NOT NULL DEFAULT 0,
  interruptions INTEGER NOT NULL DEFAULT 0,
  request TEXT NOT NULL,
  resolved TEXT NOT NULL,
  report TEXT NOT NULL,
  progress INTEGER NOT NULL DEFAULT 0,
  phase TEXT,
  step INTEGER,
  total_steps INTEGER,
  eta_s REAL,
  run TEXT,
  error TEXT,
  file TEXT,
  body_hash TEXT,
  idempotency TEXT,
  is_cancel_requested INTEGER NOT NULL DEFAULT 0,
  parent TEXT,
  UNIQUE (owner, idempotency)
);
CREATE INDEX videos_in_order ON videos(status, priority DESC, seq);
CREATE INDEX videos_by_owner ON videos(owner, seq);
CREATE INDEX videos_by_body ON videos(body_hash) WHERE body_hash IS NOT NULL;
CREATE TABLE events(
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  video TEXT NOT NULL,
  owner TEXT NOT NULL,
  type TEXT NOT NULL,
  data TEXT NOT NULL,
  at REAL NOT NULL
);
CREATE INDEX events_by_video ON events(video, number);
"""


class Database:
    """Connections to the file of the queue. All methods are thread-safe.

    A new file is written only if it `may_be_new`.

    Raises:
        StoreError: the file can't be opened or is missing, or another version wrote it.
    """

    def __init__(self, path: Path, *, may_be_new: bool = True) -> None:
        if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
            raise StoreError(
                f"SQLite {sqlite3.sqlite_version} is too old for the queue; it needs "
                f"{'.'.join(map(str, _OLDEST_SQLITE))}"
            )
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._is_closed = False
        self._readers = threading.Lock()
        self._writing = threading.Lock()
        with _explained(path):
            self._writer = self._connect()
            self._writer.execute("PRAGMA journal_mode=WAL")
            self._create(may_be_new)
        self._file = os.stat(path)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Context: a connection for reading, used by this thread alone."""
        with self._readers:
            connection = self._idle.pop() if self._idle else None
        with _explained(self._path):
            self._check_file()
            if connection is None:
                connection = self._connect()
            try:
                yield connection
            finally:
                with self._readers:
                    if self._is_closed:
                        connection.close()
                    else:
                        self._idle.append(connection)

    @contextmanager
    def write(self, *, is_durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Context: a transaction, committed at the end of the block and undone by an error.

        Without `is_durable` a power cut may lose it, until a durable transaction follows.
        """
        with self._writing, _explained(self._path):
            self._check_file()
            self._writer.execute(f"PRAGMA synchronous={'FULL' if is_durable else 'NORMAL'}")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close all connections; those in use are closed after their use."""
        with self._writing, self._readers:
            self._is_closed = True
            for connection in (*self._idle, self._writer):
                connection.close()
            self._idle.clear()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        connection.row_factory = sqlite3.Row
        for setting in ("synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
            connection.execute(f"PRAGMA {setting}")
        return connection

    def _check_file(self) -> None:
        """Raise `StoreError` if the file was removed or replaced: SQLite would write on into it."""
        try:
            is_there = os.path.samestat(os.stat(self._path), self._file)
        except OSError:
            is_there = False
        if not is_there:
            raise StoreError(
                f"the queue {str(self._path)!r} was removed or replaced while it was served; put "
                "the same file back, or stop the server"
            )

    def _create(self, may_be_new: bool) -> None:
        """Write the schema into a new file; refuse that of another version."""
        found = int(self._writer.execute("PRAGMA user_version").fetchone()[0])
        if found == 0 and not may_be_new:
            raise StoreError(
                f"the queue {str(self._path)!r} is missing or empty, but its folder holds videos "
                "of jobs, which a new queue would delete; put the queue back, or move the folders "
                "videos and runs elsewhere"
            )
        if found == 0:
            self._writer.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={VERSION}; COMMIT;"
            )
        elif found != VERSION:
            raise StoreError(
                f"the queue {str(self._path)!r} is by another version of Everyframe (schema "
                f"{found}, this one has {VERSION}); serve it with that version, or give another "
                "--data-dir"
            )


def is_full(error: StoreError) -> bool:
    """Whether the queue could not be written because its disk is full."""
    return isinstance(error.__cause__, sqlite3.Error) and _SAYS_FULL in str(error.__cause__)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Context: SQLite's errors as `StoreError`, with what to do."""
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        fix = "is its disk damaged, or was the file changed by hand?"
        if _SAYS_FULL in text:
            fix = "free some space on its disk"
        elif len(os.fsencode(path.resolve())) > _LONGEST_PATH:
            fix = f"give a shorter --data-dir: SQLite takes paths of {_LONGEST_PATH} bytes at most"
        elif "readonly" in text or "unable to open" in text:
            fix = "make the folder writable"
        elif "locked" in text:
            fix = "end the other program that uses it"
        raise StoreError(f"the queue {str(path)!r} can't be read or written ({text}); {fix}") from (
            error
        )
