"""Start workers, wait until they run, and train the image classifier across them.

    python examples/workers/start.py                              two workers, a short training on digits
    python examples/workers/start.py -n 4 --cpu 0.5 -- --epochs 12      more workers, and flags for the classifier
    python examples/workers/stop.py                               ends the workers

The workers belong to this folder's daemon session, like those of `hora workers launch`: they keep running after
this script, for another training or for `hora workers list`.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from hora.workers import await_workers, keep_session, launch_workers, stop_workers

CLASSIFIER = Path(__file__).resolve().parent.parent / "image_classifier.py"
SHORT = ["--width", "8", "--epochs", "2", "--log-dir", "out/workers"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--cpu", type=float, default=1.0, help="cores for each (default: 1)")
    parser.add_argument("--memory", type=float, default=2.0, help="GiB for each (default: 2)")
    parser.add_argument("flags", nargs="*", help="for image_classifier.py, after --")
    options = parser.parse_args()

    keep_session()
    workers = launch_workers(
        options.n, cpu=options.cpu, memory=options.memory, code="!sleep infinity", name="trainer", all_or_nothing=True
    )
    refused = [worker["message"] for worker in workers if "id" not in worker]
    if refused:
        sys.exit(f"{refused[0]}; ask for less, or make room with examples/workers/stop.py")

    result = await_workers(workers, wait_for_completion=False, timeout_seconds=120)
    for worker in result["workers"] + result["failures"]:
        print(f"worker {worker['id']}  {worker['status']:9}  {worker['ip_address']}", flush=True)
    if result["failures"]:
        stop_workers(*workers)
        sys.exit(f"{len(result['failures'])} of {options.n} workers do not run")

    hosts = ",".join(f"{worker['ip_address']}:1" for worker in result["workers"])
    horovodrun = Path(sys.executable).with_name("horovodrun")
    command = [horovodrun, "-np", str(options.n), "-H", hosts, sys.executable, CLASSIFIER, *SHORT, *options.flags]
    print(" ".join(os.path.relpath(part) if isinstance(part, Path) else part for part in command), flush=True)
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
