"""``everyframe serve --executor ray``: killed and back, each job goes on on the cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from everyframe.media.read import read_video
from helpers import ray_cluster
from helpers.server_process import ServerProcess

pytestmark = pytest.mark.slow

OPTIONS = {"num_frames": 33, "size": "64x64", "num_inference_steps": 200, "seed": 3}
#: For a machine with much else to do.
SECONDS = 400


@pytest.fixture
def address() -> Iterator[str]:
    pytest.importorskip("fastapi", reason="serving needs the extra everyframe[server]")
    with pytest.MonkeyPatch.context() as patch, ray_cluster.token(patch):
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'everyframe[ray]'")
        with ray_cluster.cluster(num_cpus=1) as found:
            yield found.address


def video_of(server: ServerProcess, job: str, file: Path) -> Any:
    status, data = server.ask(f"/v1/videos/{job}/content")
    assert status == 200
    file.write_bytes(data)
    return read_video(file)[0]


def test_a_killed_server_and_a_killed_actor_lose_no_step(address: str, tmp_path: Path) -> None:
    words, folder = ("--executor", "ray", "--ray-address", address), tmp_path / "data"
    with ServerProcess(folder, *words) as server:
        job, second = server.create(**OPTIONS), server.create(**OPTIONS)
        server.wait_for(job, lambda found: 20 <= found["progress"] < 100, SECONDS)
        server.kill()
    with ServerProcess(folder, *words) as server:
        server.wait_for(job, lambda found: found["status"] == "in_progress", SECONDS)
        done = server.wait_for(job, "completed", SECONDS)
        assert done["resumed_from_step"] >= 1
        # The second one's actor is killed: it needs no attempt of the server's.
        server.wait_for(second, lambda found: 20 <= found["progress"] < 90, SECONDS)
        os.kill(ray_cluster.actor_processes()[-1], signal.SIGKILL)
        other = server.wait_for(second, "completed", SECONDS)
        videos = [video_of(server, each, tmp_path / f"{each}.mp4") for each in (job, second)]
        unbroken = server.create(**OPTIONS)
        server.wait_for(unbroken, "completed", SECONDS)
        videos.append(video_of(server, unbroken, tmp_path / "unbroken.mp4"))
        assert server.stop()[0] == 0
    assert any("was lost" in text for text in other["warnings"])
    assert np.array_equal(videos[0], videos[2])
    assert np.array_equal(videos[1], videos[2])
