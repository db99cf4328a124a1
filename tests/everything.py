"""Run every target of the Makefile that tests something, one after another, and print a table: a night's work.

    python tests/everything.py               # make everything: what has passed on this commit is not run again
    python tests/everything.py test fuzz     # these alone, and again
    python tests/everything.py --table       # the table so far

The results are in out/everything: a log for each target, and results.json. A target that is interrupted runs again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "out" / "everything"
RUNTIMES = sorted(path.stem for path in (ROOT / "runtimes").glob("*.txt") if not path.stem.startswith("ray-"))
# By name: make's arguments.
TARGETS = {
    name: name
    for name in (
        *("test", "demo", "docs", "test-slow", "test-security", "test-habits", "test-hosts", "test-store"),
        *(
            "test-tensorflow",
            "test-torch-distributed",
            "test-spark-protected",
            "test-containers",
            "test-perfetto",
            "test-mlflow",
        ),
        *("coverage", "verify", "simulate", "chaos", "scale", "release-check"),
    )
} | {
    "ray 2.60": "test-ray RAY=2.60",
    "ray 2.9": "test-ray RAY=2.9",
    "spark 3.5.7": "test-spark VERSION=3.5.7",
    "sanitize": "sanitize",
    "fuzz": "fuzz SECONDS=1800",
    "soak": "soak MINUTES=60",
    **{f"runtime {name}": f"test-runtime NAME={name}" for name in RUNTIMES},
}
_SUMMARY = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+ in [\d.:]+.*?)\s*=*$", re.MULTILINE)


def commit() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def read() -> dict[str, dict[str, object]]:
    path = FOLDER / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run(name: str) -> dict[str, object]:
    """Run a target; its processes end with this one's interrupt."""
    began = time.monotonic()
    log = FOLDER / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["make", *TARGETS[name].split()], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
    found = _SUMMARY.findall(log.read_text(errors="replace"))
    return {
        "commit": commit(),
        "status": status,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "summary": "; ".join(found[-4:]),
        "log": str(log.relative_to(ROOT)),
    }


def table(results: dict[str, dict[str, object]]) -> str:
    rows = ["| target | commit | status | minutes | summary |", "|---|---|---|---|---|"]
    for name in TARGETS:
        one = results.get(name)
        cells = [one[key] for key in ("commit", "status", "minutes", "summary")] if one else ["", "not run", "", ""]
        rows.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TARGET", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("--table", action="store_true", help="print the table so far")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in TARGETS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; the targets are {', '.join(TARGETS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = read()
    for name in [] if options.table else options.names or TARGETS:
        known = results.get(name, {})
        if not options.names and known.get("commit") == commit() and known.get("status") == 0:
            continue
        print(f"{time.strftime('%H:%M')} make {TARGETS[name]}", flush=True)
        results[name] = run(name)
        (FOLDER / "results.json").write_text(json.dumps(results, indent=2))
        print(
            f"      status {results[name]['status']}, {results[name]['summary'] or 'see ' + str(results[name]['log'])}"
        )
    print(table(results))
    return any(one["status"] != 0 for one in results.values())


if __name__ == "__main__":
    raise SystemExit(main())
