"""Chunks on disk: one safetensors file each, shared by processes, never written twice in place.

A file is written under another name and renamed, so readers see all of it or nothing. What is read
is checked: the format, the model, the tokens and their context when it is opened, a checksum of
each layer when that is read. Deleting a file takes nothing from those who have it open.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torch_cascade.runtime.blend_layers import KeyValue
from torch_cascade.runtime.chunks import Chunk, ChunkKey, Dtypes, table_bytes
from torch_cascade.runtime.fingerprint import checksum
from torch_cascade.runtime.positions import Frequencies, RopeTable

_FORMAT = "torch_cascade.chunk.1"
_SUFFIX, _UNFINISHED = ".safetensors", ".tmp"
_NAME_LENGTH = 64  # sha256
_ABANDONED_S = 3600.0


class ChunkFileError(RuntimeError):
    """A file of the store's folder is not what its name says; the message names it and why."""


@dataclass(frozen=True, eq=False)
class ChunkFile:
    """A chunk on disk, its header checked.

    Attributes:
        path: the file.
        key: what it holds.
        tables: of the model's rotary embeddings when the keys were computed.
        nbytes: of keys and values.
    """

    path: Path
    key: ChunkKey
    tables: tuple[RopeTable, ...]
    nbytes: int
    _file: Any
    _checksums: tuple[tuple[str, str], ...]

    @cached_property
    def frequencies(self) -> bytes:
        """Equal where `tables` are."""
        return table_bytes(self.tables)

    @cached_property
    def dtypes(self) -> Dtypes:
        """Of each layer's keys and values; nothing is read."""
        known: dict[str, torch.dtype] = {}

        def dtype(name: str) -> torch.dtype:
            kind = self._file.get_slice(name).get_dtype()  # in a tenth of the time of a tensor
            if kind not in known:
                known[kind] = self._file.get_tensor(name).dtype
            return known[kind]

        layers = range(len(self._checksums))
        return tuple((dtype(f"keys.{i}"), dtype(f"values.{i}")) for i in layers)

    def like(self, index: int) -> KeyValue:
        """Tensors of the sizes and dtype of a layer's keys and values; nothing is read."""
        keys, values = (self._file.get_tensor(f"{name}.{index}") for name in ("keys", "values"))
        return keys, values

    def layer(self, index: int) -> KeyValue:
        """Keys [H, T, D] and values [H, T, Dv] of a layer, read and checked, on the CPU.

        Raises:
            ChunkFileError: the content is not what was written.
        """
        keys, values = self.like(index)
        for name, tensor, wanted in zip(
            ("keys", "values"), (keys, values), self._checksums[index], strict=True
        ):
            if checksum(tensor) != wanted:
                raise ChunkFileError(f"{self.path}: the {name} of layer {index} are corrupted")
        return keys, values


class ChunkFolder:
    """The files of a folder, held to a budget by deleting those not used for longest.

    Processes may share it. The time of last use is the file's modification time, so that all of
    them see it. Files of other names are left alone.
    """

    def __init__(self, folder: Path, budget: int | None) -> None:
        """Use `folder`, made if it is not there, up to `budget` bytes (None: without limit)."""
        self.folder = folder
        self.budget = budget
        folder.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()

    def path(self, key: ChunkKey) -> Path:
        """Where a chunk's file is, if there is one."""
        return self.folder / f"{key.name}{_SUFFIX}"

    def prefetch(self, key: ChunkKey) -> None:
        """Ask the system to read a chunk's file, if it is there, and do not wait for it.

        Opening files one by one waits for the disk several times a file.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):  # `open` says what is wrong with it
            descriptor = os.open(self.path(key), os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def open(self, key: ChunkKey, model_tables: Sequence[RopeTable]) -> ChunkFile | None:
        """The chunk's file, checked but for the layers' content; None where there is none.

        Args:
            key: the chunk.
            model_tables: the model's present ones: those that are lookup tables are not in files.

        Raises:
            ChunkFileError: the file is truncated, corrupted, or holds something else.
        """
        path = self.path(key)
        try:
            file = safe_open(path, framework="pt", device="cpu")
            found = _checked(path, file, key, model_tables)
            with contextlib.suppress(PermissionError):  # a folder that is only read
                os.utime(path)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise ChunkFileError(f"{path}: not a readable chunk: {error}") from error
        return found

    def write(self, chunk: Chunk) -> bool:
        """Keep a chunk; False where it is larger than the whole budget."""
        if self.budget is not None and chunk.nbytes > self.budget:
            return False
        descriptor, name = tempfile.mkstemp(_UNFINISHED, f".{chunk.key.name}.", self.folder)
        os.close(descriptor)
        unfinished = Path(name)
        try:
            save_file(_tensors(chunk), unfinished, _metadata(chunk))
            _sync(unfinished)
            unfinished.replace(self.path(chunk.key))
            _sync(self.folder)
        finally:
            unfinished.unlink(missing_ok=True)
        self.evict()
        return True

    def evict(self) -> int:
        """Delete the files not used for longest until the rest fits; how many."""
        files = sorted(self._files(), key=lambda entry: entry[1].st_mtime_ns, reverse=True)
        used, deleted = 0, 0
        for path, stat in files:
            used += stat.st_size
            # The newest stays whatever its header adds: its content was held against the budget.
            if self.budget is not None and used > self.budget and path != files[0][0]:
                path.unlink(missing_ok=True)
                used -= stat.st_size
                deleted += 1
        return deleted

    def sizes(self) -> dict[str, int]:
        """Bytes of each chunk's file, by name."""
        return {path.name.removesuffix(_SUFFIX): stat.st_size for path, stat in self._files()}

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if len(path.name) != _NAME_LENGTH + len(_SUFFIX):
                continue
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                yield path, path.stat()

    def _remove_abandoned(self) -> None:
        """What killed writers left."""
        for path in self.folder.glob(f".*{_UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    path.unlink()


def _tensors(chunk: Chunk) -> dict[str, Tensor]:
    tensors = {
        "ids": torch.tensor(chunk.key.ids),
        "context": torch.tensor(chunk.key.context, dtype=torch.int64),
    }
    for index, pair in enumerate(chunk.layers):
        for name, states in zip(("keys", "values"), pair, strict=True):
            tensors[f"{name}.{index}"] = states.cpu().contiguous()
    for index, table in enumerate(chunk.tables):
        if isinstance(table, Frequencies):
            tensors[f"inv_freq.{index}"] = table.inv_freq.float().cpu().contiguous()
    return tensors


def _metadata(chunk: Chunk) -> dict[str, str]:
    factors = [t.factor if isinstance(t, Frequencies) else None for t in chunk.tables]
    sums = [[checksum(states) for states in pair] for pair in chunk.layers]
    return {
        "format": _FORMAT,
        "model": chunk.key.model,
        "factors": json.dumps(factors),
        "checksums": json.dumps(sums),
        "nbytes": str(chunk.nbytes),
    }


def _checked(path: Path, file: Any, key: ChunkKey, model_tables: Sequence[RopeTable]) -> ChunkFile:
    metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise ChunkFileError(f"{path}: format {metadata.get('format')!r}, not {_FORMAT!r}")
    if metadata["model"] != key.model:
        raise ChunkFileError(f"{path}: computed by another model, {metadata['model'][:12]}...")
    for name, wanted in (("ids", key.ids), ("context", key.context)):
        if tuple(file.get_tensor(name).tolist()) != wanted:
            raise ChunkFileError(f"{path}: its {name} are not those that its name says")
    factors = json.loads(metadata["factors"])
    sums = tuple((k, v) for k, v in json.loads(metadata["checksums"]))
    missing = {f"{n}.{i}" for n in ("keys", "values") for i in range(len(sums))} - set(file.keys())
    if missing or len(factors) != len(model_tables):
        raise ChunkFileError(f"{path}: incomplete, {sorted(missing) or 'rotary tables'} missing")
    tables = tuple(
        model_tables[index]
        if factor is None
        else Frequencies(file.get_tensor(f"inv_freq.{index}").clone(), factor)
        for index, factor in enumerate(factors)
    )
    return ChunkFile(path, key, tables, int(metadata["nbytes"]), file, sums)


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
