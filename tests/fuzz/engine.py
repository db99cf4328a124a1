"""Stress the engine with random programs and shrink those that fail. Each failure prints a command to reproduce it.

    python tests/fuzz/engine.py --programs 2000                    seeds 0 to 1999, on 2 to 4 ranks in turn
    python tests/fuzz/engine.py --seed 17 --ranks 3                one program; shrunk if it fails
    python tests/fuzz/engine.py --seed 17 --ranks 3 --victim 1     rank 1 dies
    python tests/fuzz/engine.py --show --seed 17 --ranks 3         only print it
    python tests/fuzz/engine.py --replay '{"num_ranks":2,…}'       a printed program

The exit code is 1 if a program failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "multiproc")]

from rank_pool import Pools  # noqa: E402
from stress.generate import generate  # noqa: E402
from stress.judge import Record, category, judge  # noqa: E402
from stress.program import Program, listing  # noqa: E402
from stress.shrink import shrink  # noqa: E402

DEATH_EVERY = 25  # programs; a death requires fresh processes


class Stage:
    """Runs programs on pools of ranks that are kept until a program fails."""

    def __init__(self, limit_s: float) -> None:
        self._pools = Pools()
        self._limit_s = limit_s

    def play(self, program: Program) -> list[str]:
        """Run a program; return its errors."""
        lost = () if program.death is None else (program.death.rank,)
        with tempfile.TemporaryDirectory(prefix="stress-") as folder:
            arguments = {"text": program.to_text(), "folder": folder, "limit_s": self._limit_s}
            self._pools.call(program.num_ranks, {}, lost, "stress.player", "play", arguments)
            return judge(program, _records(program, folder))

    def close(self) -> None:
        self._pools.close()


def _records(program: Program, folder: str) -> dict[int, Record]:
    paths = {rank: Path(folder) / f"rank{rank}" for rank in range(program.num_ranks)}
    return {rank: Record.from_text(path.read_text()) for rank, path in paths.items() if path.exists()}


def _programs(options: argparse.Namespace) -> Iterator[tuple[str, Program]]:
    if options.replay is not None:
        yield "the replay", Program.from_text(options.replay)
        return
    seeds = range(options.start, options.start + options.programs) if options.seed is None else [options.seed]
    for seed in seeds:
        num_ranks = options.ranks or 2 + seed % 3
        victim = options.victim
        if victim is None and seed % DEATH_EVERY == DEATH_EVERY - 1:
            victim = seed // DEATH_EVERY % num_ranks
        program = generate(seed, num_ranks, num_operations=options.operations, victim=victim)
        yield f"seed {seed} on {num_ranks} ranks", program


def _report(stage: Stage, program: Program, wrong: list[str], options: argparse.Namespace) -> None:
    def fails(candidate: Program) -> bool:
        nonlocal last
        for _ in range(options.tries):
            found = stage.play(candidate)
            if found and category(found) == category(wrong):
                last = found
                return True
        return False

    smallest, last = program, wrong
    if not options.no_shrink:
        smallest = shrink(program, fails, max_attempts=options.attempts)
    print(f"\n{listing(smallest)}\n\nfailed like this:\n" + "\n".join(last[:12]))
    print(f"\n    python tests/fuzz/engine.py --replay '{smallest.to_text()}'\n", flush=True)


def main() -> int:
    options = _options()
    stage, num_failed, num_played, started = Stage(options.limit), 0, 0, time.monotonic()
    try:
        for what, program in _programs(options):
            if options.show:
                print(listing(program))
                continue
            num_played += 1
            if num_played % 100 == 0:
                print(f"{num_played} programs, {num_failed} failed", flush=True)
            repeats = range(options.repeat)
            if wrong := next((found for _ in repeats if (found := stage.play(program))), None):
                num_failed += 1
                print(f"{what} failed:\n" + "\n".join(wrong[:12]), flush=True)
                if options.replay is None:
                    _report(stage, program, wrong, options)
                if num_failed >= options.failures:
                    break
    finally:
        stage.close()
    minutes = (time.monotonic() - started) / 60
    if num_played:
        print(f"{num_played} programs, {num_failed} failed, {num_played / minutes:.0f} a minute")
    return 1 if num_failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--ranks", type=int, help="the size of the world; 2 to 4 in turn without it")
    parser.add_argument("--victim", type=int, help="a rank that dies; every 25th program has one without it")
    parser.add_argument("--operations", type=int, default=20, help="of a program, about")
    parser.add_argument("--replay", help="a program as text")
    parser.add_argument("--repeat", type=int, default=1, help="play each program so often: races need luck")
    parser.add_argument("--show", action="store_true", help="print the programs, play none")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument(
        "--tries", type=int, default=3, help="how often a smaller program may pass before it counts as good"
    )
    parser.add_argument("--attempts", type=int, default=300, help="how many smaller programs are tried")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one program; more is a hang")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
