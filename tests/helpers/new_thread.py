"""What a thread finds that starts now."""

from __future__ import annotations

import threading

import torch


def threads_of_a_new_thread() -> int:
    """Number of threads that torch would compute with in a new thread."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]
