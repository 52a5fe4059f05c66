"""The server's folder: one server at a time, private, on a local disk, whole files only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from everyframe.core.errors import InputError, RunLockedError
from everyframe.server import data_folder
from everyframe.server.data_folder import (
    DataFolder,
    default_folder,
    file_system_of,
    is_video_id,
    open_folder,
)
from everyframe.server.queue.store import JobStore

ID = "video_" + "ab" * 16


def test_one_server_at_a_time(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "server")
    with pytest.raises(RunLockedError, match=r"the data folder .* is in use by another process"):
        open_folder(tmp_path / "server")
    folder.close()
    open_folder(tmp_path / "server").close()


def test_the_folder_is_private(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir(mode=0o755)
    with_folder = open_folder(tmp_path / "server")
    for path in (with_folder.path, with_folder.videos, with_folder.inputs, with_folder.runs):
        assert path.stat().st_mode & 0o777 == 0o700
    with_folder.close()


def test_a_folder_with_other_things_keeps_its_mode(tmp_path: Path) -> None:
    """``--data-dir ~`` must not close it to others; what is ours is private there too."""
    tmp_path.chmod(0o755)
    (tmp_path / "of others").touch()
    folder = open_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    JobStore(folder).close()
    for path in (folder.database, folder.videos, folder.inputs, folder.runs):
        assert path.stat().st_mode & 0o077 == 0
    folder.close()


def test_a_folder_of_everybody_is_refused(tmp_path: Path) -> None:
    """In /tmp, others could make our folders before us."""
    (tmp_path / "of others").touch()
    tmp_path.chmod(0o1777)
    with pytest.raises(InputError, match="for files of everybody; give a folder in it"):
        open_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    assert [each.name for each in tmp_path.iterdir()] == ["of others"]


def test_a_folder_that_was_deleted_for_room_is_made_again(folder: DataFolder) -> None:
    folder.videos.rmdir()
    folder.runs.rmdir()
    for place in (folder.new_video(ID), folder.new_runs_of(ID)):
        assert place.stat().st_mode & place.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        open_folder(tmp_path / "server")


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_folder, "file_system_of", lambda folder: "nfs4")
    with pytest.raises(InputError, match=r"on a network file system .nfs4.*on a local disk"):
        open_folder(tmp_path / "server")


def test_the_innermost_mount_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Mount:
        def __init__(self, mountpoint: str, fstype: str) -> None:
            self.mountpoint, self.fstype = mountpoint, fstype

    mounts = [Mount("/net/home", "nfs"), Mount("/", "ext4"), Mount("/net/home/me/disk", "xfs")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
    found = {place: file_system_of(Path(place)) for place in
             ("/srv", "/net/home/me", "/net/home/me/disk", "/net/homes")}  # fmt: skip
    assert found == {
        "/srv": "ext4", "/net/home/me": "nfs", "/net/home/me/disk": "xfs", "/net/homes": "ext4",
    }  # fmt: skip


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("EVERYFRAME_SERVER_DIR", raising=False)
    assert default_folder() == tmp_path / "everyframe" / "server"
    monkeypatch.setenv("EVERYFRAME_SERVER_DIR", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own"


def test_only_our_ids_become_paths(tmp_path: Path) -> None:
    assert is_video_id(ID)
    for text in ("", "..", "video_../../x", ID + "/..", ID.upper(), "video_" + "a" * 31, ID + "\n"):
        assert not is_video_id(text)
    folder = open_folder(tmp_path / "server")
    with pytest.raises(AssertionError):
        folder.video("../../etc")
    folder.close()


def test_inputs_are_named_by_their_content(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "server")
    name = folder.add_input(b"pixels", "png")
    assert folder.add_input(b"pixels", "png") == name
    assert (folder.path / name).read_bytes() == b"pixels"
    assert name.startswith("inputs/")
    assert name.endswith(".png")
    for prompt in ("inputs/x.png", name):  # a prompt is shown in the record, and no path is
        request = folder.request_of({"prompt": prompt, "image": name, "seed": 3})
        assert (request.prompt, request.image) == (prompt, str(folder.path / name))
    with pytest.raises(InputError, match="ending must be letters"):
        folder.add_input(b"pixels", "../x")
    folder.close()


def test_files_of_a_video_appear_at_once(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "server")
    (folder.new_video(ID) / "video.mp4").write_bytes(b"half")
    assert not folder.video(ID).exists()
    assert folder.published(ID) is None
    (folder.new_video(ID) / "video.mp4").write_bytes(b"whole")
    folder.publish(ID, {"file": "x"})
    assert (folder.video(ID) / "video.mp4").read_bytes() == b"whole"
    assert folder.published(ID) == {"file": "x"}
    assert [path.name for path in folder.videos.iterdir()] == [ID]
    folder.close()


def test_the_queue_imports_no_torch() -> None:
    program = (
        "import sys, everyframe.server.queue.store, everyframe.server.data_folder; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_file_that_goes_meanwhile_keeps_no_other(folder: DataFolder) -> None:
    """Archives of frames lie beside the uploads while they are sent."""
    gone, old = folder.inputs / "a.zip", folder.path / folder.add_input(b"1", "png")
    gone.symlink_to(folder.inputs / "nothing")  # whose state can't be read, as of a deleted file
    folder.remove_inputs((), before=old.stat().st_mtime + 1)
    assert not old.exists()


def test_an_upload_that_is_sent_again_while_old_ones_are_deleted_stays(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder.path / folder.add_input(b"1", "png")
    os.utime(place, (0, 0))
    renew = os.utime

    def late(path: Path) -> None:
        """It was there, and somebody deletes what is old before its age is renewed."""
        deleting.start()
        deleting.join(0.2)
        renew(path)

    deleting = threading.Thread(target=folder.remove_inputs, args=((), place.stat().st_mtime + 9))
    monkeypatch.setattr(data_folder.os, "utime", late)
    folder.add_input(b"1", "png")
    deleting.join()
    assert place.read_bytes() == b"1"
