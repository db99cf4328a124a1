"""Stop the workers that start.py, or `hora workers launch`, has left running in this folder.

python examples/workers/stop.py            all of them, and their session
python examples/workers/stop.py ID ...     only these
"""

import sys

from hora.workers import end_session, list_workers, stop_workers


def main():
    stopped = stop_workers(*sys.argv[1:]) or []
    for response in stopped:
        print(f"worker {response.id}  {'stopped' if response.ok else 'unknown'}")
    if all(worker["finished_at"] is not None for worker in list_workers()):
        end_session()
    print(f"{sum(response.ok for response in stopped)} workers stopped")
    sys.exit(0 if all(response.ok for response in stopped) else 1)


if __name__ == "__main__":
    main()
