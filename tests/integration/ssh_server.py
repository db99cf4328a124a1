"""A real sshd for tests with its own keys and ports, one `sshd -i` per connection, removed at the end.

As a program, `ssh_server.py CONFIG ADDRESS…` listens on a free port of each address, prints the ports as JSON and
starts an sshd for every connection until its stdin ends. That way it also runs inside a network
namespace.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path

SSHD = "/usr/sbin/sshd"
# Root's sshd insists on an empty /run/sshd, which only its service creates, so mount a private /run.
_OWN_RUN = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec "$@"', "sh")


class SshServer:
    """Hosts reachable by ssh: `names` are aliases, which only the ssh command of this object knows.

    Two more hosts are unreachable: `locked` requires another key, `down` does not listen.
    """

    def __init__(self, folder: Path, names: dict[str, str], *, prefix: tuple[str, ...] = ()) -> None:
        self._folder, self._names, self._prefix = folder, names, prefix
        self.key = folder / "key"
        self.wrong_key = folder / "wrong_key"

    def __enter__(self) -> SshServer:
        for key in (self.key, self.wrong_key, self._folder / "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
            subprocess.run(command, check=True, timeout=30)
        (self._folder / "authorized").write_text(self.key.with_suffix(".pub").read_text())
        own_run = _OWN_RUN if os.geteuid() == 0 and not os.path.isdir("/run/sshd") else ()
        config = self._folder / "sshd_config"
        config.write_text(
            f"HostKey {self._folder}/host_key\nAuthorizedKeysFile {self._folder}/authorized\nStrictModes no\n"
            "UsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
        )
        addresses = list(self._names.values())
        self._process = subprocess.Popen(
            [*self._prefix, *own_run, sys.executable, __file__, str(config), *addresses],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.ports = dict(zip(self._names, json.loads(self._process.stdout.readline()), strict=True))
        self._write_client_config()
        return self

    def _write_client_config(self) -> None:
        first = next(iter(self._names))
        hosts = [(name, address, self.ports[name], self.key) for name, address in self._names.items()]
        hosts.append(("locked", self._names[first], self.ports[first], self.wrong_key))
        hosts.append(("down", "127.0.0.3", 1, self.key))
        text = "".join(
            f"Host {name}\n  HostName {address}\n  Port {port}\n  IdentityFile {key}\n"
            for name, address, port, key in hosts
        )
        (self._folder / "ssh_config").write_text(
            f"{text}Host *\n  UserKnownHostsFile {self._folder}/known_hosts\n"
            "  GlobalKnownHostsFile /dev/null\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        )

    @property
    def command(self) -> str:
        """Return the value of HORA_SSH: an ssh that knows these hosts and ignores this machine's configuration."""
        return f"ssh -F {self._folder}/ssh_config"

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def serve(config: str, addresses: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap ended sshds automatically
    selector = selectors.DefaultSelector()
    ports = []
    for address in addresses:
        server = socket.create_server((address, 0))
        ports.append(server.getsockname()[1])
        selector.register(server, selectors.EVENT_READ, server)
    print(json.dumps(ports), flush=True)
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                return
            with key.data.accept()[0] as connection:
                subprocess.Popen([SSHD, "-i", "-f", config], stdin=connection, stdout=connection)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
