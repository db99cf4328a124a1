"""A rank that keeps a connection to its launcher and does nothing else.

`python store_rank.py FOLDER`; it exits when FOLDER contains a file `stop`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hora.net.client import ControlClient
from hora.platforms.detect import detect_world


def main(folder: Path) -> None:
    world = detect_world()
    client = ControlClient.connect(world.rendezvous, name=f"rank {world.rank}", worker=world.worker, timeout_s=60)
    step = 0
    with (folder / f"worker.{world.worker}").open("a", buffering=1) as notes:
        while not (folder / "stop").exists():
            step += 1
            notes.write(f"{os.getpid()} {step} {world.size}\n")
            if world.rank == 0 and step % 10 == 0:
                print("step", step, flush=True)
            assert not client.closed, "it was cut off"
            time.sleep(0.05)
    client.set(f"finished by {world.rank}", b"")  # the current leader answers
    client.close()
    print("rank", world.rank, "has finished at step", step, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
