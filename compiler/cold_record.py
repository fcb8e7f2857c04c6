"""Records of cold compilations, kept for the warm ones.

Where AOTAutograd's cache has an artefact, Inductor runs no pass, and there is nothing to report. So
each cold compilation leaves its record in Inductor's cache folder, and a warm one finds it by what
identifies an artefact: the code that Inductor generated for it, which comes with it out of the
cache (`compiler.generated_code`), and the pipeline's `uuid`. Torch's own keys would not do: below
one key lie the artefacts of different guards, rewritten or not.

Records are pickles behind a checksum, beside the pickles of torch itself: whoever can write there
can already run code in the user's processes. They take 64 MiB at most; the longest unused go first.
A record that cannot be written or read never fails a compilation: the report says what happened.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
import zlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from torch_cascade.compiler.record import Compilation

logger = logging.getLogger(__name__)

_MAGIC = b"torch_cascade record 2\n"
_LIMIT = 64 * 2**20
_KEPT = ("sites", "blend", "linears", "before", "after", "pictures")


class RecordError(ValueError):
    """A record that is there and cannot be used."""


def keep_or_recall(record: Compilation, codes: Sequence[str], uuid: Any) -> None:
    """Keep the record of a cold compilation; complete that of a warm one.

    Args:
        record: of a compilation that has ended.
        codes: what Inductor generated, or found in its cache.
        uuid: that of the pipeline; None for one that is never cached.
    """
    key = _key(codes, uuid) if codes and uuid is not None else None
    if record.cached:
        record.origin = _recalled(record, key)
    elif key is not None and not _caches_are_off():
        _keep(record, key)


def folder() -> Path:
    """Where records are: in the folder of Inductor's own caches, so they are cleared together."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "torch_cascade"


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a record whole or not at all, then drop the longest unused above the limit."""
    payload = zlib.compress(pickle.dumps(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    digest = hashlib.sha256(payload).hexdigest().encode()
    draft.write_bytes(_MAGIC + digest + b"\n" + payload)
    draft.replace(path)
    _evict(path.parent)


def read(path: Path) -> dict[str, Any] | None:
    """A record; None if there is none.

    Raises:
        RecordError: it is damaged, or cannot be read.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RecordError(f"cannot be read: {error.strerror or error}") from error
    digest, _, payload = text.removeprefix(_MAGIC).partition(b"\n")
    if not text.startswith(_MAGIC) or hashlib.sha256(payload).hexdigest().encode() != digest:
        raise RecordError("is damaged: its checksum is another")
    try:
        content: dict[str, Any] = pickle.loads(zlib.decompress(payload))
    except Exception as error:  # any class in it may have changed
        raise RecordError(f"cannot be read: {error}") from error
    return content


def _keep(record: Compilation, key: str) -> None:
    content = {name: getattr(record, name) for name in _KEPT}
    content["date"] = datetime.now().astimezone()
    try:
        write(_path(key), content)
    except Exception as error:  # a full disk, a user's object that has no pickle
        logger.warning("the record for later, warm compilations is not kept: %s", error)


def _recalled(record: Compilation, key: str | None) -> str:
    """Complete a warm compilation's record; where that is from, or why it is not complete."""
    try:
        content = None if key is None else read(_path(key))
    except RecordError as error:
        logger.warning("%s: the record of the cold compile %s", _path(key or ""), error)
        return f"the record of its cold compile {error}"
    if content is None:
        return "no record of its cold compile was found"
    for name in _KEPT:
        setattr(record, name, content[name])
    _touch(_path(key or ""))
    return f"from the cold compile of {content['date']:%Y-%m-%d %H:%M:%S}"


def _path(key: str) -> Path:
    return folder() / f"{key}.record"


def _key(codes: Sequence[str], uuid: Any) -> str:
    versions = (torch.__version__, sys.version_info[:2])
    return hashlib.sha256(repr((list(codes), uuid, versions)).encode()).hexdigest()


def _caches_are_off() -> bool:
    from torch._inductor import config

    return bool(config.force_disable_caches)


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError as error:  # a cache that may only be read, or another process dropped it
        logger.debug("%s: %s", path, error)


def _evict(root: Path) -> None:
    """Drop files, the longest unused first, until the others take no more than the limit."""
    found = []
    for path in root.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:  # another process dropped it
            continue
        found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= _LIMIT:
            return
        path.unlink(missing_ok=True)
        total -= size
