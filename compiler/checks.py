"""What `python -m torch_cascade doctor` looks at: one `Check` for each thing this package needs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch.torch_version import TorchVersion

from torch_cascade.compiler import calibration
from torch_cascade.compiler.options import Options, cache_folder, settings, written
from torch_cascade.passes.devices import no_kernel

_PACKAGE = "torch-cascade"
_GROUP, _BACKEND = "torch_dynamo_backends", "cascade"

State: TypeAlias = Literal["ok", "absent", "bad"]


@dataclass(frozen=True)
class Check:
    """One thing.

    Attributes:
        name: what was looked at.
        state: "ok"; "absent": not there, and only some of this package needs it; "bad": nothing
            can be compiled as asked until it is put right.
        found: version, path, or what is wrong.
        advice: what to install or change ("" if nothing is to be done).
    """

    name: str
    state: State
    found: str
    advice: str = ""


def all_checks() -> Iterator[Check]:
    """Every check, each made when it is asked for; none changes anything but a cache's folder."""
    yield _python()
    yield _torch()
    yield _entry_point()
    yield _cpp_compiler()
    yield from _gpus()
    yield _triton()
    yield _optional("transformers", "SharedPrefixCache and ChunkStore", "hf")
    yield _optional("rich", "the demonstration, and tables like this one", "demo")
    options = _resolved()
    yield _option_check(options)
    yield _calibrated("auto" if isinstance(options, str) else options.calibration)
    yield _inductor_folder()
    yield _own_folder()


def _python() -> Check:
    found, asked = platform.python_version(), metadata.metadata(_PACKAGE)["Requires-Python"]
    if _within(found, asked):
        return Check("Python", "ok", f"{found} ({sys.executable})")
    return Check("Python", "bad", found, f"use Python {asked}")


def _torch() -> Check:
    found, asked = str(torch.__version__), _asked("torch")
    if _within(found, asked):
        return Check("torch", "ok", found)
    return Check("torch", "bad", found, f"pip install 'torch{asked}'")


def _asked(package: str) -> str:
    """The versions of a package that this one works with: "<2.16,>=2.11"; "" for any."""
    for requirement in metadata.requires(_PACKAGE) or ():
        name, versions = re.findall(r"^([\w.-]+)\s*([^;]*)", requirement)[0]
        if name == package:
            return str(versions).strip()
    return ""


def _within(version: str, asked: str) -> bool:
    """Whether a version meets every one of some bounds, ">=" or "<"."""
    have = TorchVersion(version)
    bounds = re.findall(r"(>=|<)\s*([\d.]+)", asked)
    return all(have >= limit if sign == ">=" else have < limit for sign, limit in bounds)


def _entry_point() -> Check:
    name = f"backend {_BACKEND!r}"
    found = list(metadata.entry_points(group=_GROUP, name=_BACKEND))
    if not found:
        said = f"no entry point {_BACKEND} in the group {_GROUP}"
        return Check(name, "bad", said, f"pip install {_PACKAGE} (or pip install -e . in a clone)")
    try:
        found[0].load()
    except (ImportError, AttributeError) as error:
        return Check(name, "bad", f"{found[0].value}: {error}", f"install {_PACKAGE} again")
    if len(found) > 1 and len({point.value for point in found}) > 1:
        said = "several: " + ", ".join(point.value for point in found)
        return Check(name, "bad", said, "uninstall the package that gives another one")
    return Check(name, "ok", found[0].value)


def _cpp_compiler() -> Check:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    name, advice = "C++ compiler", "install g++ or clang++, or name one in the variable CXX"
    try:
        compiler = get_cpp_compiler()
        said = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except InvalidCxxCompiler:
        return Check(name, "bad", "Inductor finds none", advice)
    except (OSError, subprocess.SubprocessError) as error:
        return Check(name, "bad", str(error), advice)
    return Check(name, "ok", f"{compiler}: {said.splitlines()[0] if said else 'no version'}")


def _gpus() -> Iterator[Check]:
    if not torch.cuda.is_available():
        advice = "" if torch.version.cuda else "for an NVIDIA GPU: torch built for CUDA"
        yield Check("GPU", "absent", "none that this torch can use; the CPU is used", advice)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        about = torch.cuda.get_device_properties(device)
        said = f"{about.name}, compute capability {about.major}.{about.minor}"
        why = no_kernel(device)
        state: State = "absent" if why else "ok"
        yield Check(f"GPU {index}", state, said, f"plain Inductor here: {why}" if why else "")


def _triton() -> Check:
    try:
        import triton
    except ImportError as error:
        state: State = "bad" if torch.cuda.is_available() else "absent"
        said = f"not usable: {error}" if error.name != "triton" else "not installed"
        return Check("Triton", state, said, "for a GPU: pip install triton")
    note = "" if torch.cuda.is_available() else " (used on a GPU only)"
    return Check("Triton", "ok", f"{triton.__version__}{note}")


def _optional(package: str, use: str, extra: str) -> Check:
    asked, advice = _asked(package), f"for {use}: pip install '{_PACKAGE}[{extra}]'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(package, "absent", "not installed", advice)
    if _within(found, asked):
        return Check(package, "ok", found)
    return Check(package, "absent", f"{found}, but {asked} is needed", advice)


def _resolved() -> Options | str:
    """The options as variables set them; the error if one does not take its value."""
    try:
        return Options.resolve()[0]
    except ValueError as error:
        return str(error)


def _option_check(options: Options | str) -> Check:
    if isinstance(options, str):
        return Check("options", "bad", options, "set it to what is expected, or unset it")
    values = written(options)
    told = [f"{s.variable}={values[s.name]}" for s in settings() if values[s.name] != s.default]
    return Check("options", "ok", "  ".join(told) or "all as by default")


def _calibrated(choice: str) -> Check:
    """The figures that the cost model has for the device compiled for by default."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = calibration.default_path(device) if choice == "auto" else Path(choice)
    advice = "measure this machine: python -m torch_cascade calibrate"
    try:
        if choice == "auto" and path.exists():
            calibration.read(path, device)  # a bad one there is passed over, with a warning
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            figures = calibration.device_for(device, choice)
    except calibration.CalibrationError as error:
        state: State = "absent" if choice == "auto" else "bad"
        return Check("calibration", state, str(error), advice)
    if figures.is_measured:
        return Check("calibration", "ok", f"{figures}, {path}")
    return Check("calibration", "absent" if figures.is_generic else "ok", str(figures), advice)


def _inductor_folder() -> Check:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    name, advice = "Inductor's cache", "name a folder in the variable TORCHINDUCTOR_CACHE_DIR"
    try:
        folder = cache_dir()
    except OSError as error:
        return Check(name, "bad", str(error), advice)
    if os.access(folder, os.W_OK | os.X_OK):
        return Check(name, "ok", folder)
    return Check(name, "bad", f"{folder} cannot be written to", advice)


def _own_folder() -> Check:
    """Calibrations are kept there; it is made when one is written."""
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return Check("our cache", "ok", f"{folder}{'' if folder == there else ' (not made yet)'}")
    said = f"{folder}: {there} cannot be written to"
    return Check("our cache", "absent", said, "name a folder in the variable XDG_CACHE_HOME")
