"""Mass runs of random programs: `python -m support.fuzz --count 2000 --seed 0 --jobs 2`.

Run from `tests/`; the results go to `build/fuzz`. Every worker is a process of its own that appends
one JSON line a program to `OUT/worker-I.jsonl`, so a run that was stopped goes on where it stood,
and a program that kills its process (a floating-point trap in a kernel) is a result like any other.
Failures are shrunk.
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHRINK_PER_KIND = 4
TRIES = 2  # a program that was running twice when its process died did it
DEFAULT_OUT = Path(__file__).parents[2] / "build" / "fuzz"


class Slow(BaseException):
    """A program took too long; no `Exception`, or some layer of torch would take it for a bug."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--backend", default="eager_cascade", help="eager_cascade, cascade, plain")
    parser.add_argument("--timeout", type=int, default=90, help="processor seconds a program")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker is None:
        _supervise(options)
        print(table(list(records(options.out))))
        return
    _work(options)


def records(out: Path) -> Iterator[dict[str, Any]]:
    """All results in a folder; a program that was started and never ended is a crash."""
    for path in sorted(out.glob("worker-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        ended = {r["seed"] for r in lines if "kind" in r}
        yield from (r for r in lines if "kind" in r)
        lost = {r["seed"] for r in lines} - ended
        yield from ({"seed": s, "kind": "crash", "detail": "the process died"} for s in lost)


def table(results: list[dict[str, Any]]) -> str:
    """What happened, counted; then every failure's source."""
    kinds = collections.Counter(r["kind"] for r in results)
    declined: collections.Counter[str] = collections.Counter()
    owed: collections.Counter[str] = collections.Counter()
    for record in results:
        declined.update(record.get("declined", {}))
        if record["kind"] == "ok":
            done = "rewritten" if record["rewritten"] else "left"
            owed[f"{record['expected']}: {done}"] += 1
    lines = [f"{len(results)} programs", "", "result", *_rows(kinds)]
    lines += ["", "expected: done (of the good ones)", *_rows(owed)]
    lines += ["", "declined by reason (sites)", *_rows(declined)]
    for record in results:
        if record["kind"] not in ("ok", "crash"):
            lines += ["", "=" * 80, f"seed {record['seed']}", record["detail"]]
        if record["kind"] == "crash":
            lines += ["", "=" * 80, f"seed {record['seed']}: {record['detail']}"]
    return "\n".join(lines)


def _rows(counter: collections.Counter[str]) -> list[str]:
    return [f"  {count:6d}  {name}" for name, count in counter.most_common()]


def _supervise(options: argparse.Namespace) -> None:
    """Keep `jobs` workers alive until every seed has a result; show progress."""
    from tqdm import tqdm

    workers = [_start(options, i) for i in range(options.jobs)]
    with tqdm(total=options.count, desc="programs") as bar:
        while any(w.poll() != 0 for w in workers):
            time.sleep(1)
            results = [r for r in records(options.out) if r["kind"] != "crash"]  # or running
            bar.n = len(results)
            bad = collections.Counter(r["kind"] for r in results if r["kind"] != "ok")
            bar.set_postfix(dict(bad))
            for index, worker in enumerate(workers):
                if worker.poll() not in (None, 0):
                    workers[index] = _start(options, index)


def _start(options: argparse.Namespace, index: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "support.fuzz", "--worker", str(index)]
    for name in ("count", "seed", "jobs", "out", "backend", "timeout"):
        command += [f"--{name}", str(getattr(options, name))]
    log = (options.out / f"worker-{index}.log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log)


def _work(options: argparse.Namespace) -> None:
    """Run this worker's share of the seeds, except those that its file already has."""
    path = options.out / f"worker-{options.worker}.jsonl"
    seen = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    tries = collections.Counter(r["seed"] for r in seen if "kind" not in r)
    ended = {r["seed"] for r in seen if "kind" in r}
    shrunk = collections.Counter(r["kind"] for r in seen if r.get("kind", "ok") != "ok")
    backend = _backend(options.backend)
    with path.open("a") as out:
        for seed in range(
            options.seed + options.worker, options.seed + options.count, options.jobs
        ):
            if seed in ended or tries[seed] >= TRIES:
                continue
            print(json.dumps({"seed": seed}), file=out, flush=True)
            record = _one(seed, backend, options.timeout, shrunk)
            print(json.dumps(record), file=out, flush=True)


def _backend(name: str) -> Any:
    if name == "cascade":
        return name
    from .backend import eager_cascade
    from .programs import plain

    return plain if name == "plain" else eager_cascade(decide="always", verify=True)


def _one(seed: int, backend: Any, timeout: int, shrunk: collections.Counter[str]) -> dict[str, Any]:
    from .program_shrink import shrink
    from .programs import Fault, Program, expectation, random_program, report, run_program

    def attempt(program: Program) -> tuple[str, Any]:
        signal.setitimer(signal.ITIMER_PROF, timeout)
        try:
            return "ok", run_program(program, backend)
        except Fault as fault:
            return fault.kind, fault
        except Slow as error:
            return "slow", error
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    signal.signal(signal.SIGPROF, _timeout)
    begin = time.time()
    program = random_program(seed)
    kind, result = attempt(program)
    record = {"seed": seed, "kind": kind, "seconds": time.time() - begin}
    record["expected"] = str(expectation(program))
    if kind == "ok":
        return {**record, **vars(result)}
    if kind == "slow":
        return {**record, "detail": report(program)}
    shrunk[kind] += 1
    if shrunk[kind] <= SHRINK_PER_KIND:
        smallest = shrink(program, lambda p: attempt(p)[0] == kind, budget=40)
        _, result = attempt(smallest)
    return {**record, "detail": str(result)}


def _timeout(*_: object) -> None:
    raise Slow("no result in time")


if __name__ == "__main__":
    main()
