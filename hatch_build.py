"""The build hook: compiles the native part (`src/hora/engine/shm/calls.c`) where there is a C compiler.

    pip install .                   a wheel with the library, for this kind of machine; else py3-none-any
    pip install -e .                the library in the source tree (`make native` builds it anew)
    HORA_NATIVE=0 pip wheel .       py3-none-any, whatever there is
    CC=aarch64-linux-gnu-gcc pip wheel .    for another machine: the tag is read from what was built

A wheel with the library is for every Python 3 and for every glibc from the newest symbol that the library needs on, at
least 2.17 (manylinux_2_17). The library is no extension module: it is loaded by its path, declares what it uses of
Python's stable ABI, and finds that in the Python that loads it. So Python's headers are not needed. Called by
hatchling.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER, SOURCE, LIBRARY = Path("src/hora/engine/shm"), "calls.c", "libhora.so"
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-shared", "-s")
LEAST_GLIBC = (2, 17)
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of ELF


class NativePart(BuildHookInterface):
    """Puts the library into a wheel, or beside its source where that is installed as it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / FOLDER
        if version == "editable":
            (folder / LIBRARY).unlink(missing_ok=True)
            compiled(folder / SOURCE, folder / LIBRARY)
            return
        self._scratch = tempfile.TemporaryDirectory()
        library = Path(self._scratch.name) / LIBRARY
        if compiled(folder / SOURCE, library):
            build_data["force_include"][str(library)] = str(FOLDER.relative_to("src") / LIBRARY)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(library.read_bytes())}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel" and version != "editable":
            self._scratch.cleanup()


def compiled(source: Path, library: Path) -> bool:
    """Build the library. False where that is not wanted or does not work."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if os.environ.get("HORA_NATIVE") == "0" or sys.platform != "linux" or not shutil.which(compiler[0]):
        return False
    try:
        checksum = f"-DSOURCE_CHECKSUM={source_checksum(source.parent)}u"
        subprocess.run([*compiler, *FLAGS, checksum, "-o", str(library), str(source)], check=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"the native part could not be built, Hora does without it: {error}", file=sys.stderr)
        library.unlink(missing_ok=True)
        return False
    return True


def source_checksum(folder: Path) -> int:
    """Return the checksum of the native part's sources, as `hora.engine.shm.native` computes it."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(folder.glob("*.[ch]"))))


def platform_tag(library: bytes) -> str:
    """Where the library can be loaded: the machine it is for, and the oldest glibc that has what it needs."""
    machine = MACHINES[struct.unpack_from("<H", library, 18)[0]]
    if platform.libc_ver()[0] != "glibc":
        return f"linux_{machine}"
    needed = [tuple(map(int, version)) for version in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    major, minor = max([*needed, LEAST_GLIBC])
    return f"manylinux_{major}_{minor}_{machine}"
