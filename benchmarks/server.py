"""What does the server cost beside the bare engine, and does it lose a job when it is killed?

    python benchmarks/server.py                          # both parts, up to half an hour each
    python benchmarks/server.py --only throughput --jobs 200
    python benchmarks/server.py --only kills --kills 20
    python benchmarks/server.py --folder FOLDER          # continues where that folder was left

Throughput: tiny jobs of the embedded model through the API, by 20 clients that each wait for their
job as OpenAI's client does, by turns with the same jobs given to the warm workers that the server
uses. A ratio is taken within a round. Wall times need a free machine; processor time of the whole
tree is there beside them. Latencies are of create and retrieve while jobs run.

Kills: 50 jobs are queued, and until the given number of kills the server, its worker or both are
killed with -9 at random moments; the server is started again at once. At the end there must be 50
videos, each done once, with the bytes that an unbroken run gave.

Everything is on loopback, in a folder of its own that is removed at the end, and bounded by
``--minutes`` for each part.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from result_pages import compose_page, make_parser, publish, versions_of

from everyframe._version import __version__
from everyframe.core.request import Request
from everyframe.engine.workers.warm_workers import WarmWorkers
from everyframe.engine.workers.worker_process import WorkerJob
from everyframe.hardware import machine_facts

SOURCE = Path(__file__).parent.parent / "src"
CLIENTS = 20
PROMPT = "a red circle moves to the right on a blue background"
TINY = {"prompt": PROMPT, "num_frames": 1, "size": "16x16", "num_inference_steps": 1}
#: A job that takes seconds, so that kills meet it at its steps.
LONGER = {"prompt": PROMPT, "num_frames": 4, "size": "32x32", "num_inference_steps": 60}
SEEDS = 5


class Server:
    """``everyframe serve`` over a folder, started again after each kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()

    def start(self) -> None:
        words = ["--port", "0", "--data-dir", str(self.folder), "--max-queue", "0",
                 "--no-previews", "--max-attempts", "100"]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "everyframe", "serve", *words],
            env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"serving on (http://\S+);", line)
        assert found, f"it did not begin: {line}"
        self.address = urlsplit(found[1]).netloc

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Client:
    """One connection, kept open; `latencies` of each kind of request in seconds."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: http.client.HTTPConnection | None = None
        self.latencies: dict[str, list[float]] = {"create": [], "retrieve": []}

    def ask(self, method: str, path: str, data: Any = None) -> tuple[Any, http.client.HTTPMessage]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._server.address, timeout=300)
        body = None if data is None else json.dumps(data)
        try:
            self._connection.request(method, path, body, {"content-type": "application/json"})
            answer = self._connection.getresponse()
        except ConnectionError:  # it was idle for too long
            assert method == "GET", "what creates is not asked twice"
            self._connection.close()
            self._connection = None
            return self.ask(method, path)
        text = answer.read()
        assert answer.status == 200, (answer.status, text[:500])
        is_json = answer.headers["content-type"].startswith("application/json")
        return (json.loads(text) if is_json else text), answer.headers

    def timed(self, kind: str, method: str, path: str, data: Any = None) -> Any:
        began = time.perf_counter()
        answer = self.ask(method, path, data)
        self.latencies[kind].append(time.perf_counter() - began)
        return answer

    def make(self, options: dict[str, Any]) -> dict[str, Any]:
        """Create a job and ask until it is completed, as OpenAI's client does."""
        job, headers = self.timed("create", "POST", "/v1/videos", options)
        while job["status"] in ("queued", "in_progress"):
            time.sleep(int(headers.get("openai-poll-after-ms", 1000)) / 1000)
            job, headers = self.timed("retrieve", "GET", f"/v1/videos/{job['id']}")
        assert job["status"] == "completed", job
        return dict(job)


class Seconds:
    """Processor seconds of processes, also of those that end meanwhile."""

    def __init__(self, processes: Callable[[], list[psutil.Process]]) -> None:
        self._processes = processes
        self._before = self._now()

    def _now(self) -> dict[int, float]:
        return {p.pid: sum(p.cpu_times()[:2]) for p in self._processes()}

    def spent(self) -> float:
        return sum(now - self._before.get(pid, 0.0) for pid, now in self._now().items())


def bare_round(workers: WarmWorkers, folder: Path, seeds: range) -> dict[str, float]:
    """The jobs one after the other, without a server, a queue or a file."""
    own = psutil.Process()
    known = {child.pid for child in own.children()}
    used = Seconds(lambda: [own, *(c for c in own.children() if c.pid in known)])
    began = time.perf_counter()
    for seed in seeds:
        for _ in workers.run(WorkerJob(Request(**TINY, seed=seed), root=folder, as_uint8=True)):
            pass
    wall = time.perf_counter() - began
    return {"wall": wall / len(seeds), "cpu": used.spent() / len(seeds)}


def server_round(server: Server, seeds: range) -> dict[str, Any]:
    """The jobs by 20 clients at once."""
    todo, lock, clients = iter(seeds), threading.Lock(), [Client(server) for _ in range(CLIENTS)]
    errors: list[BaseException] = []

    def work(client: Client) -> None:
        try:
            while True:
                with lock:
                    seed = next(todo, None)
                if seed is None:
                    return
                client.make({**TINY, "seed": seed})
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            errors.append(error)

    used, began = Seconds(server.processes), time.perf_counter()
    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    if errors:
        raise errors[0]
    memory = [process.memory_info().rss / 2**20 for process in server.processes()]
    latencies = {
        kind: [seconds for client in clients for seconds in client.latencies[kind]]
        for kind in ("create", "retrieve")
    }
    return {
        "wall": wall / len(seeds), "cpu": used.spent() / len(seeds), "memory": memory,
        **latencies,
    }  # fmt: skip


def throughput(folder: Path, num_jobs: int, size: int, until: float) -> Iterator[dict[str, Any]]:
    """Rounds of bare engine and server by turns; each is a row."""
    server, workers = Server(folder / "throughput"), WarmWorkers()
    try:
        Client(server).make(TINY)
        bare_round(workers, folder / "bare", range(2))
        for first in range(0, num_jobs, size):
            if time.monotonic() > until:
                return
            number = min(size, num_jobs - first)
            bare = bare_round(workers, folder / "bare", range(max(number // 4, 4)))
            row = server_round(server, range(first, first + number))
            yield {"jobs": number, "bare": bare, "server": row, "load": os.getloadavg()[0]}
    finally:
        server.kill()
        workers.close()


def kills(folder: Path, number: int, num_jobs: int, until: float) -> dict[str, Any]:
    """Kill at random moments; what became of the jobs. Goes on with what the folder holds."""
    server, moments = Server(folder / "kills"), random.Random()
    began, done_kills = time.monotonic(), Counter(json_of(folder / "kills.json", {}))
    try:
        client = Client(server)
        whole = [_unbroken(client, folder / f"unbroken-{seed}.mp4", seed) for seed in range(SEEDS)]
        ids = json_of(folder / "ids.json", [])
        for place in range(len(ids), num_jobs):
            job, _ = client.ask("POST", "/v1/videos", {**LONGER, "seed": place % SEEDS})
            ids.append(job["id"])
        (folder / "ids.json").write_text(json.dumps(ids))
        while sum(done_kills.values()) < number and time.monotonic() < until:
            # Half of them meet a job at its steps, the others whatever there is: a start, a pause.
            if moments.random() < 0.5:
                _wait_for_steps(server)
            time.sleep(moments.uniform(0, 3))
            what = moments.choice(("server", "worker", "both"))
            workers = server.processes()[1:]
            if what == "worker" and not workers:
                continue
            if what != "server":
                for worker in workers:
                    worker.kill()
            if what != "worker":
                server.kill()
                server.start()
            done_kills[what] += 1
            (folder / "kills.json").write_text(json.dumps(done_kills))
            if all(job["status"] == "completed" for job in _jobs(server, ids)):
                break
        while any(job["status"] in ("queued", "in_progress") for job in _jobs(server, ids)):
            time.sleep(1)
        jobs, client = _jobs(server, ids), Client(server)
        good = sum(
            client.ask("GET", f"/v1/videos/{job['id']}/content")[0] == whole[place % SEEDS]
            for place, job in enumerate(jobs)
            if job["status"] == "completed"
        )
        return {
            "kills": dict(done_kills), "jobs": len(ids), "right bytes": good,
            "statuses": dict(Counter(job["status"] for job in jobs)),
            "resumed": sum(job["resumed_from_step"] is not None for job in jobs),
            "done twice": _done_twice(folder / "kills" / "jobs.sqlite"),
            "minutes": (time.monotonic() - began) / 60,
        }  # fmt: skip
    finally:
        server.kill()


def _unbroken(client: Client, file: Path, seed: int) -> bytes:
    """The video of a seed when nothing is killed."""
    if not file.exists():
        job = client.make({**LONGER, "seed": seed})
        file.write_bytes(client.ask("GET", f"/v1/videos/{job['id']}/content")[0])
    return file.read_bytes()


def _wait_for_steps(server: Server) -> None:
    """Until a job denoises, or none is left."""
    client = Client(server)
    while True:
        queue = client.ask("GET", "/v1/queue")[0]
        if not queue["data"] or any(job["phase"] == "denoise" for job in queue["data"]):
            return
        time.sleep(0.1)


def _jobs(server: Server, ids: list[str]) -> list[dict[str, Any]]:
    client = Client(server)
    return [client.ask("GET", f"/v1/videos/{each}")[0] for each in ids]


def _done_twice(database: Path) -> int:
    import sqlite3

    connection = sqlite3.connect(database)
    query = "SELECT count(*) FROM events WHERE type = 'done' GROUP BY video HAVING count(*) > 1"
    found = len(connection.execute(query).fetchall())
    connection.close()
    return found


def json_of(path: Path, otherwise: Any) -> Any:
    """Content of a file of an earlier run, or `otherwise`."""
    return json.loads(path.read_text()) if path.exists() else otherwise


def page_of(rows: list[dict[str, Any]], killed: dict[str, Any] | None) -> str:
    """The result page."""
    lines: list[str] = []
    if rows:
        lines += _throughput_lines(rows)
    if killed:
        lines += ["## Kills", "", "| what | |", "| --- | --- |"]
        lines += [f"| {name} | {value:.1f} |" if isinstance(value, float) else
                  f"| {name} | {value} |" for name, value in killed.items()]  # fmt: skip
    facts = machine_facts("cpu")
    versions = f"{versions_of(facts)}, everyframe {__version__}"
    machine = f"{facts.cpu.name}, {facts.num_cores} cores; {versions}."
    title = "The server beside the bare engine, and killed"
    return compose_page(title, "\n".join(lines), machine)


def _throughput_lines(rows: list[dict[str, Any]]) -> list[str]:
    loads = [row["load"] for row in rows]
    ratios = [row["bare"]["wall"] / row["server"]["wall"] for row in rows]
    work = [row["server"]["cpu"] / row["bare"]["cpu"] for row in rows]
    lines = [
        f"{sum(row['jobs'] for row in rows)} jobs by {CLIENTS} clients in {len(rows)} rounds; load "
        f"of the machine {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores.", "",
        "| what | median of rounds | least | most |", "| --- | --- | --- | --- |",
        _row("jobs a second, of the bare engine's", ratios),
        _row("processor time of a job, server and worker, bare engine = 1", work),
        _row("seconds a job, bare engine (wall)", [row["bare"]["wall"] for row in rows]),
        _row("seconds a job, server (wall)", [row["server"]["wall"] for row in rows]),
    ]  # fmt: skip
    lines += ["", "| latency while jobs run, ms | p50 | p90 | p99 | requests |",
              "| --- | --- | --- | --- | --- |"]  # fmt: skip
    for kind in ("create", "retrieve"):
        values = sorted(1000 * s for row in rows for s in row["server"][kind])
        cuts = [values[min(int(len(values) * p), len(values) - 1)] for p in (0.5, 0.9, 0.99)]
        lines.append(f"| {kind} | {cuts[0]:.1f} | {cuts[1]:.1f} | {cuts[2]:.1f} | {len(values)} |")
    memory = [row["server"]["memory"] for row in rows]
    lines += ["", "Memory of the server after each round, MiB: "
              + ", ".join(f"{each[0]:.0f}" for each in memory)
              + "; of its workers: " + ", ".join(f"{sum(each[1:]):.0f}" for each in memory) + ".",
              ""]  # fmt: skip
    return lines


def _row(what: str, values: list[float]) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"| {what} | {middle:.2f} | {least:.2f} | {most:.2f} |"


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="everyframe-") as made:
            yield Path(made)
    else:
        Path(given).mkdir(parents=True, exist_ok=True)
        yield Path(given)


def main() -> None:
    """Measure, print, and write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=("throughput", "kills"))
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--round", type=int, default=100)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder")
    args = parser.parse_args()
    with _folder(args.folder) as folder:
        rows: list[dict[str, Any]] = json_of(folder / "rows.json", [])
        killed = None
        if args.only != "kills":
            left = args.jobs - sum(row["jobs"] for row in rows)
            until = time.monotonic() + args.minutes * 60
            for row in throughput(folder, left, args.round, until) if left > 0 else ():
                rows.append(row)
                (folder / "rows.json").write_text(json.dumps(rows))
                print(f"{row['jobs']} jobs: {row['server']['wall']:.3f} s each, bare "
                      f"{row['bare']['wall']:.3f} s", flush=True)  # fmt: skip
        if args.only != "throughput":
            until = time.monotonic() + args.minutes * 60
            killed = kills(folder, args.kills, 50, until)
        publish("server", page_of(rows, killed), is_page=args.is_page)


if __name__ == "__main__":
    main()
