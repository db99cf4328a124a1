"""How one of this package's modules is started in a Python process of its own."""

from __future__ import annotations

__all__ = ["module_command"]

# As `python -m`, which however looks for modules in the current directory first: in a folder that others can write to
# (/tmp, a shared project) a planted file would run as the user. `-P` says the same from Python 3.11 on.
_RUN_MODULE = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; del sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(executable: str, module: str, *args: str) -> tuple[str, ...]:
    """The argv of a Python that runs this module and imports nothing from the directory it is started in."""
    return (executable, "-c", _RUN_MODULE, module, *args)
