"""`--check-build`: tests what works on this machine, in a child process.

The child (`python -m hora.legacy.check_build`) runs one collective through each back end and prints why one does not
work; the launcher only formats that and never imports torch. `hora doctor` uses it too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping

from hora.launch.processes import module_command
from hora.legacy.env import env_without_world
from hora.version import horovod_version

_LIMIT_S = 120.0
_NO_MPI = "there is no MPI in Hora; a script started by mpirun finds its rank by itself"
_SECTIONS = {
    "Available Frameworks": ("TensorFlow", "PyTorch", "MXNet"),
    "Available Controllers": ("MPI", "Gloo"),
    "Available Tensor Operations": ("NCCL", "DDL", "CCL", "MPI", "Gloo"),
}
_NEVER = {
    "MXNet": "Hora has fronts for PyTorch and TensorFlow only",
    "MPI": _NO_MPI,
    "DDL": "IBM's DDL is no longer available",
    "CCL": "oneCCL is not supported",
}


def check_build(verbose: bool = False) -> str:
    """Return the text of `horovodrun --check-build`; with `verbose` also the reasons of failures."""
    problems = probe_build()
    native = f"without the native part: {problems['native']}" if "native" in problems else "with the native part"
    text = format_build(f"{horovod_version()}, {native}", problems)
    return "\n".join([text, *(f"{name}: {problem}" for name, problem in problems.items() if verbose)])


def print_build(verbose: bool = False) -> None:
    """Print it, like `horovod.runner.launch.check_build`."""
    print(check_build(verbose))


def format_build(version: str, problems: Mapping[str, str]) -> str:
    """Format one line per entry, checked unless it is in `problems`."""
    parts = [f"Horovod v{version}:"]
    for title, names in _SECTIONS.items():
        lines = [f"    [{' ' if name in problems else 'X'}] {name}" for name in names]
        parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def probe_build() -> dict[str, str]:
    """Return why entries do not work, as found by a child process."""
    try:
        child = subprocess.run(
            module_command(sys.executable, "hora.legacy.check_build"),
            env=env_without_world(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        answer = json.loads(child.stdout.splitlines()[-1])
        return _NEVER | {str(name): str(problem) for name, problem in answer.items()}
    except subprocess.TimeoutExpired:
        why = f"the trial did not end within {_LIMIT_S:.0f} s"
    except (IndexError, ValueError, AttributeError):
        last = (child.stderr.strip().splitlines() or ["no output"])[-1]
        why = f"the trial ended with status {child.returncode}: {last}"
    return _NEVER | dict.fromkeys(_TRIALS, why)


def _try_front(framework: str) -> str | None:
    if framework == "tensorflow" and importlib.util.find_spec(framework) is None:
        return "TensorFlow is not installed: pip install tensorflow-cpu"
    hvd = importlib.import_module(f"horovod.{framework}")
    hvd.init()
    try:
        result = hvd.allreduce(importlib.import_module(framework).ones(3), op=hvd.Sum).numpy().tolist()
        return None if result == [hvd.size()] * 3 else f"an allreduce of ones returned {result}"
    finally:
        hvd.shutdown()


def _try_backend(name: str, device: str) -> str | None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU is visible here"
    if not dist.is_available() or not dist.is_backend_available(name):
        return f"this torch ({torch.__version__}) was built without {name}"
    dist.init_process_group(name, store=HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(3, device=device)
        dist.all_reduce(ones)
        return None if ones.tolist() == [1.0] * 3 else f"an allreduce of ones returned {ones.tolist()}"
    finally:
        dist.destroy_process_group()


def _try_native() -> str | None:
    from hora.engine.shm.native import absence

    return absence()


# Each returns why it does not work, or raises an error that tells.
_TRIALS: dict[str, Callable[[], str | None]] = {
    "native": _try_native,
    "PyTorch": lambda: _try_front("torch"),
    "TensorFlow": lambda: _try_front("tensorflow"),
    "Gloo": lambda: _try_backend("gloo", "cpu"),
    "NCCL": lambda: _try_backend("nccl", "cuda"),
}


def _main() -> None:
    problems: dict[str, str | None] = {}
    for name, trial in _TRIALS.items():
        try:
            problems[name] = trial()
        except Exception as error:  # any error is the answer
            problems[name] = traceback.format_exception_only(error)[-1].strip()
            if "--traceback" in sys.argv:
                traceback.print_exc()
    print(json.dumps({name: problem for name, problem in problems.items() if problem}), flush=True)


if __name__ == "__main__":
    _main()
