"""The command `hora doctor`: probes all hosts at once and reports. Exit status 0: no problem, 1: a problem."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hora.cli.doctor.findings import Finding, agreement, host_findings, reach_findings, summary
from hora.cli.doctor.probe import MARK
from hora.launch.controller.launcher import wait_or_kill
from hora.launch.ha.leadership import open_store
from hora.launch.ha.store import StoreError
from hora.launch.processes import module_command, variables
from hora.launch.providers.ssh import Ssh, reachable_address
from hora.launch.slots import parse_host_files, parse_hosts_and_slots
from hora.net import sockets

_PROBE_LIMIT_S = 180.0
_LEAVE_LIMIT_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Run `hora doctor`."""
    args = make_parser().parse_args(argv)
    try:
        names = _names(args)
        ssh = Ssh.from_environ(variables(), port=args.ssh_port, identity_file=args.ssh_identity_file)
        return _examine(names, ssh)
    except ValueError as error:
        print(f"hora doctor: error: {error}", file=sys.stderr)
        return 2
    except (FileNotFoundError, PermissionError) as error:  # ssh is not installed
        print(f"hora doctor: cannot run {error.filename!r}: {error.strerror}; is it installed?", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hora doctor", description="Check this machine, or hosts, and say what is wrong and what to do."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", metavar="HOST,...", help="hosts, with or without :slots (default: localhost)")
    which.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="a file with a line `name slots=N` for each host"
    )
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="ssh port of all hosts")
    parser.add_argument("-i", "--ssh-identity-file", metavar="KEY", help="private key for ssh")
    return parser


def _names(args: argparse.Namespace) -> list[str]:
    if args.hostfile is not None:
        text = parse_host_files(args.hostfile)
    else:
        items = (args.hosts or "localhost").split(",")
        text = ",".join(item if ":" in item else f"{item.strip()}:1" for item in items)
    return parse_hosts_and_slots(text)[0]


class _Patient:
    """A host with a running probe. Lines arrive through a queue, so that every wait has a limit."""

    def __init__(self, name: str, ssh: Ssh, listen: str) -> None:
        self.name, self.remote = name, not sockets.is_local(name)
        if self.remote:
            argv = ssh.python(name, "hora.cli.doctor.probe", "0.0.0.0", attempts=2)
        else:
            argv = list(module_command(sys.executable, "hora.cli.doctor.probe", listen))
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, text=True, errors="replace"
        )
        self.heard_at_s = 0.0  # when its last answer arrived, by our clock
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"hora-doctor {name}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            _, mark, answer = line.partition(MARK)
            if mark:
                self.heard_at_s = time.time()
                self._answers.put(answer)
        self._answers.put(None)

    def answer(self, limit: float) -> Any:
        """Return the next JSON answer; raises RuntimeError with the host's error output if there is none."""
        try:
            line = self._answers.get(timeout=max(limit - time.monotonic(), 0.01))
        except queue.Empty:
            raise RuntimeError(f"no answer within {_PROBE_LIMIT_S:.0f} s") from None
        if line is None:
            status = self._process.wait(_PROBE_LIMIT_S)
            self._complaints.seek(0)
            complaints = self._complaints.read().decode(errors="replace").strip()
            raise RuntimeError(complaints or f"the probe ended with status {status}")
        return json.loads(line)

    def ask(self, endpoints: list[tuple[str, int]]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(endpoints) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()  # the probe ends at end of file
        wait_or_kill(self._process, _LEAVE_LIMIT_S)
        self._complaints.close()


def _examine(names: list[str], ssh: Ssh) -> int:
    own = reachable_address([name for name in names if not sockets.is_local(name)], ssh)
    patients = [_Patient(name, ssh, own) for name in names]
    findings: list[Finding] = []
    try:
        facts: dict[str, Mapping[str, Any]] = {}
        for patient, answer in zip(patients, _answers(patients), strict=True):
            if isinstance(answer, RuntimeError):
                found = [_unreachable(str(answer), patient, ssh)]
            else:
                facts[patient.name] = answer | {"clock_ahead_s": answer["clock_s"] - patient.heard_at_s}
                found = host_findings(answer)
            findings += found
            _show(patient.name, found)
        if len(facts) > 1:
            reached = [patient for patient in patients if patient.name in facts]
            endpoints = [(_address(p, ssh) if p.remote else own, facts[p.name]["port"]) for p in reached]
            found = agreement(facts) + _reach(reached, endpoints)
            findings += found
            _show("between the hosts", found)
    finally:
        for patient in patients:
            patient.close()
    if variables().get("HORA_STORE"):
        findings.append(_store(variables()["HORA_STORE"]))
        _show("the store", findings[-1:])
    print(summary(findings))
    return int(any(finding.level == "problem" for finding in findings))


def _store(url: str) -> Finding:
    """Check the store of the jobs' state from here."""
    store = open_store(url, variables())
    try:
        store.read()
    except StoreError as error:
        return Finding("problem", str(error), "check HORA_STORE, and that it runs there and can be reached from here")
    return Finding("ok", f"the store (HORA_STORE) answers: {store}")


def _answers(patients: list[_Patient]) -> list[Any]:
    """Return an answer of every host, or its RuntimeError; all hosts work at the same time."""
    limit = time.monotonic() + _PROBE_LIMIT_S
    answers: list[Any] = []
    for patient in patients:
        try:
            answers.append(patient.answer(limit))
        except RuntimeError as error:
            answers.append(error)
    return answers


def _unreachable(text: str, patient: _Patient, ssh: Ssh) -> Finding:
    if not patient.remote:
        return Finding("problem", text, "reinstall Hora in this Python environment")
    return Finding(
        "problem",
        f"ssh does not get through, or Hora cannot be started there: {text}",
        f"`ssh {patient.name} {ssh.executable} -m hora.cli.doctor.probe 127.0.0.1` must work without a password",
    )


def _address(patient: _Patient, ssh: Ssh) -> str:
    return (sockets.resolve(patient.name) or sockets.resolve(ssh.real_name(patient.name)) or [patient.name])[0]


def _reach(patients: list[_Patient], endpoints: list[tuple[str, int]]) -> list[Finding]:
    for patient in patients:
        patient.ask(endpoints)
    reached: dict[str, dict[str, str | None]] = {}
    for patient, row in zip(patients, _answers(patients), strict=True):
        problems = [str(row)] * len(patients) if isinstance(row, RuntimeError) else row
        reached[patient.name] = {p.name: problem for p, problem in zip(patients, problems, strict=True)}
    return reach_findings(reached)


def _show(title: str, findings: Sequence[Finding]) -> None:
    print(title)
    for finding in findings:
        print(f"  {finding.level:<8} {finding.text}")
        if finding.advice:
            print(f"  {'':<8} -> {finding.advice}")
    print(flush=True)
