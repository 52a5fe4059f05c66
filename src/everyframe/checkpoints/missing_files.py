"""Files that a checkpoint on this disk lacks, found from the files that it has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from everyframe.checkpoints.folder import read_json, weight_files
from everyframe.core.errors import CheckpointError

#: ``pytorch_model-00001-of-00002.bin``: the first of two says that there is a second.
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<ending>\.\w+)")
#: An index, also of a variant: ``model.safetensors.index.fp16.json``.
_INDEX = re.compile(r"(?P<stem>.+)(?P<ending>\.\w+)\.index(?P<variant>\.\w+)?\.json")
#: Parts of class names of components that have no weights.
_WITHOUT_WEIGHTS = ("Tokenizer", "Processor", "Extractor", "Scheduler")


def missing_shards(files: dict[str, Path]) -> list[str]:
    """Missing shards that an index among `files` or another shard's name refers to.

    Empty if a whole file of the same format is present: some repositories hold both.
    """
    missing: dict[str, None] = {}
    for name, path in files.items():
        index = _INDEX.fullmatch(name)
        if index is None or index["stem"] + (index["variant"] or "") + index["ending"] in files:
            continue
        folder = name.rpartition("/")[0]
        shards = read_json(path).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{path} has no weight_map; it is no index of shards")
        wanted = {f"{folder}/{shard}" if folder else str(shard) for shard in shards.values()}
        missing |= dict.fromkeys(sorted(wanted - files.keys()))
    for name in files:
        shard = _SHARD.fullmatch(name)
        if shard is None or shard["stem"] + shard["ending"] in files:
            continue
        for number in range(1, int(shard["count"]) + 1):
            sibling = f"{shard['stem']}-{number:05}-of-{shard['count']}{shard['ending']}"
            if sibling not in files:
                missing[sibling] = None
    return [*missing]


def folders_without_weights(folder: Path, without: Sequence[str]) -> list[str]:
    """Weights that a diffusers pipeline's components lack, as after a fetch without them."""
    index = folder / "model_index.json"
    components = read_json(index) if index.is_file() else {}
    return [
        f"{name}/*.safetensors"
        for name, value in components.items()
        if isinstance(value, list)
        and name not in without
        and not any(kind in str(value[-1]) for kind in _WITHOUT_WEIGHTS)
        and (folder / name / "config.json").is_file()
        and not weight_files(folder / name)
    ]
