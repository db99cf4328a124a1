"""Jobs on machines that lack something: a folder for temporary files, a name for loopback, room on a disk, processes.

The job starts without what it can do without, or says in a line what to change.
"""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from job_process import run_command

from hora.watch.recording import read_run

in_own_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting in a namespace of its own needs root"
)
SUM = "import torch, horovod.torch as hvd; hvd.init(); print('sum', hvd.allreduce(torch.ones(1), op=hvd.Sum).item())"


def with_mounts(script: str) -> tuple[str, ...]:
    """Return the beginning of a command that runs where the script has mounted something."""
    return ("unshare", "--mount", "sh", "-c", f'set -e; {script}; exec "$0" "$@"')


def test_without_a_folder_for_temporary_files_ranks_start_but_are_no_mpi_world():
    line = ("hora", "run", "-np", "2", sys.executable, "-c", SUM)
    code, out, err = run_command(*line, env={"TMPDIR": "/proc", "HORA_MPI": "1"})
    assert (code, out.count("sum 2.0")) == (0, 2), err
    assert err.count("the ranks are no MPI world: /proc/hora-") == 1
    assert "set TMPDIR to a folder that can be written" in err


@in_own_mounts
def test_the_live_page_needs_no_folder_for_temporary_files():
    # Read-only, but with its content: Hora itself may be installed there.
    prefix = with_mounts("for f in /tmp /var/tmp; do mount --bind $f $f; mount -o remount,ro,bind $f; done; cd /proc")
    line = ("hora", "run", "-np", "2", "--dashboard", "echo", "ran")
    code, out, err = run_command(*line, prefix=prefix, env={"TMPDIR": "/proc"})
    assert (code, out.count("ran")) == (0, 2), err
    assert "see it live: http://127.0.0.1:" in err


@in_own_mounts
@pytest.mark.parametrize("options", [(), ("-H", "localhost:2", "--network-interfaces", "lo")])
def test_localhost_need_not_have_a_name(options, tmp_path):
    (tmp_path / "nsswitch").write_text("hosts: files\n")
    hidden = f"mount --bind /dev/null /etc/hosts; mount --bind {tmp_path}/nsswitch /etc/nsswitch.conf"
    prefix = with_mounts(f"{hidden}; ! getent hosts localhost")
    code, out, err = run_command("horovodrun", "-np", "2", *options, sys.executable, "-c", SUM, prefix=prefix)
    assert (code, out.count("sum 2.0")) == (0, 2), err


@in_own_mounts
def test_a_full_disk_ends_the_recording_with_a_line_and_not_the_job(tmp_path):
    prefix = with_mounts(f"mount -t tmpfs -o size=4k none {tmp_path}")
    prints = "import random; [print(random.getrandbits(900)) for _ in range(300)]; print('done')"
    line = ("hora", "run", "-np", "2", "--record", str(tmp_path / "run.hora"), sys.executable, "-c", prints)
    code, out, err = run_command(*line, prefix=prefix)
    assert (code, out.count("done")) == (0, 2), err
    assert err.count("run.hora is not recorded any further: No space left on device") == 1
    assert "Traceback" not in err


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="needs root and setpriv: root has no limit of processes",
)
@pytest.mark.parametrize("allowed", [4, 5, 6, pytest.param(8, marks=pytest.mark.slow)])
def test_too_few_processes_end_the_job_with_the_limit_and_without_a_traceback(allowed, tmp_path):
    tmp_path.chmod(0o777)
    # An account that nobody has, which may read what root may.
    rights = ("--clear-groups", "--inh-caps", "+dac_override", "--ambient-caps", "+dac_override")
    user = ("setpriv", "--reuid", str(100_000 + os.getpid()), *rights)
    prefix = (*user, "bash", "-c", f'ulimit -u {allowed}; exec "$0" "$@"')
    code, out, err = run_command("hora", "run", "-np", "2", "echo", "ran", prefix=prefix, env={"TMPDIR": str(tmp_path)})
    assert code != 0, out
    assert "see `ulimit -u`" in err or "`ulimit -n` and `ulimit -u`" in err
    assert "Traceback" not in err


def test_a_job_within_a_job_has_no_page_or_recording_at_the_same_place(tmp_path):
    """Its launcher inherits the variables, but the address and the file are taken."""
    record = tmp_path / "run.hora"
    shows = 'echo page $HORA_DASHBOARD; exec "$0" run -np 1 echo within'
    line = ("hora", "run", "-np", "2", "sh", "-c", shows, shutil.which("hora", path=os.path.dirname(sys.executable)))
    code, out, err = run_command(*line, env={"HORA_DASHBOARD": "127.0.0.1:0", "HORA_RECORD": str(record)})
    assert (code, out.count("within"), out.count("page 0")) == (0, 2, 2), err
    assert err.count("see it live") == 1
    assert [line.text for line in read_run(record).lines if "within" in line.text] == ["[0]<stdout>:within"] * 2
