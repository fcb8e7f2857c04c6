"""The command `python -m torch_cascade explain script.py`: run it, then say what was compiled."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from torch_cascade.compiler.backend import keeping_all
from torch_cascade.compiler.explain import last_report
from torch_cascade.compiler.summary import Report
from torch_cascade.compiler.terminal import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the same as a page to look at")
    parser.add_argument("--diff", action="store_true", help="also what changed in the graphs")
    parser.add_argument("script", type=Path, help="a Python program that compiles with cascade")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the script as `python script.py` would, and report, even if it fails.

    Caches of whole graphs are off meanwhile: a cached artefact would have nothing to say.

    Returns:
        The exit status: that of the script; 2 after one line if it or a file for the report cannot
        be used.
    """
    script: Path = arguments.script
    if not script.is_file():
        print(f"script: expected a Python file, got {script}", file=sys.stderr)
        return 2
    report, status = _explained(script, arguments.arguments)
    show(report, diff=arguments.diff)
    try:
        _write(report, arguments.json, arguments.html)
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return status


def _explained(script: Path, arguments: list[str]) -> tuple[Report, int]:
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    # Not `force_disable_caches`: generated kernels may be taken from where they are.
    uncached = inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False)
    with keeping_all(), uncached, autograd.patch(enable_autograd_cache=False):
        status = _status_of(script, arguments)
        return last_report(), status


def _status_of(script: Path, arguments: list[str]) -> int:
    """Run it; what it raises is printed as Python itself would."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *path[1:]]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        return _exit_status(ended)
    except (Exception, KeyboardInterrupt) as error:
        _print(error, script)
        return 130 if isinstance(error, KeyboardInterrupt) else 1  # as a shell has it
    finally:
        sys.argv, sys.path = argv, path
    return 0


def _print(error: BaseException, script: Path) -> None:
    """The traceback without the frames that run the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _exit_status(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def _write(report: Report, as_json: Path | None, as_html: Path | None) -> None:
    if as_json is not None:
        as_json.write_text(report.to_json() + "\n", encoding="utf-8")
    if as_html is not None:
        as_html.write_text(report.html(), encoding="utf-8")
