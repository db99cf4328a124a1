"""Attacks from inside a job: malicious hosts and members, and forged names, settings and files.

Uses commands, `horovod.torch` and sockets only. docs/security.md lists these tests and related ones in other files.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from attacked_jobs import MEET, script
from job_process import BIN, HOROVODRUN, JobProcess, run_command

from hora.workflow import Checkpoints

HOSTS = [
    "$(touch {trap}):1",
    "-oProxyCommand=touch${{IFS}}{trap}:1",
    "a;touch {trap}:1",
    "a b:1",
    "a\n-oProxyCommand=x:1",
    "`touch {trap}`:1",
]


@pytest.mark.security
def test_host_names_and_config_files_execute_nothing(tmp_path: Path):
    trap, never = tmp_path / "trap", {"HORA_SSH": str(tmp_path / "no-such-ssh")}
    named = [host.format(trap=trap) for host in HOSTS]
    lines = [["-H", host] for host in named]
    (tmp_path / "hosts").write_text("".join(f"{host.partition(':')[0]} slots=1\n" for host in named[:2]))
    (tmp_path / "settings.yaml").write_text(f'x: !!python/object/apply:os.system ["touch {trap}"]\n')
    lines += [["--hostfile", "hosts"], ["--config-file", "settings.yaml"]]
    (tmp_path / "discover").write_text(f"#!/bin/sh\nprintf '%s\\n' '-oProxyCommand=touch {trap}:1'\n")
    (tmp_path / "discover").chmod(0o755)
    lines.append(["--min-np", "1", "--host-discovery-script", "./discover", "--start-timeout", "5"])
    for line in lines:
        status, out, err = run_command("horovodrun", "-np", "1", *line, "true", cwd=tmp_path, env=never)
        assert status != 0, line
        assert "Traceback" not in out + err, (line, err)
    assert not trap.exists()


@pytest.mark.security
@pytest.mark.spark
def test_a_tampered_spark_model_executes_nothing(spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from horovod.spark.torch import TorchModel

    trap, folder = tmp_path / "trap", tmp_path / "model"
    module = torch.nn.Linear(2, 1)
    TorchModel(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5), run_id="run").save(
        f"file://{folder}"
    )
    assert torch.equal(TorchModel.load(f"file://{folder}").getModel().weight, module.weight)
    (part,) = (folder / "metadata").glob("part-*")
    card = json.loads(part.read_text())
    objects = b"cnumpy\nndarray\n(K\x01\x85cnumpy\ndtype\nX\x01\x00\x00\x00O\x85RC\x08AAAAAAAAtR"  # object pointers
    for evil in (pickle.dumps(Exploit(trap)), b"\x80\x03}X\x05\x00\x00\x00model" + objects + b"s."):
        for values in card["paramMap"], card["defaultParamMap"]:
            values.update(dict.fromkeys(values, base64.b64encode(evil).decode()))
        part.write_text(json.dumps(card))
        for leftover in folder.rglob(".*.crc"):
            leftover.unlink()
        for strict in "01":
            monkeypatch.setenv("HORA_STRICT", strict)
            with pytest.raises(ValueError, match=r"can run any code|not plain data"):
                TorchModel.load(f"file://{folder}")
    assert not trap.exists()


class Writing(torch.nn.Module):
    """TorchScript that writes to a file when it is loaded."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return (self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.path = state[0]
        self.training = state[1]
        written = torch.from_file(self.path, True, 4, dtype=torch.uint8)
        written.fill_(88)
        print("written", int(written.sum()))  # keeps the compiler from removing the write


@pytest.mark.security
@pytest.mark.spark
def test_a_saved_torchscript_model_writes_no_file(spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from horovod.spark.torch import TorchModel

    trap = tmp_path / "trap"
    TorchModel(model=torch.jit.script(Writing(str(trap)))).save(f"file://{tmp_path / 'model'}")
    for strict in "01":
        monkeypatch.setenv("HORA_STRICT", strict)
        with pytest.raises(ValueError, match=r"a model of TorchScript.*trusted=True"):
            TorchModel.load(f"file://{tmp_path / 'model'}")
    assert not trap.exists()
    TorchModel.load(f"file://{tmp_path / 'model'}", trusted=True)
    assert trap.read_bytes() == b"XXXX", "so the attack is a real one"


DEVICE_MESH = b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\n(X\x03\x00\x00\x00cpuK\x00\x85tR."


@pytest.mark.security
@pytest.mark.parametrize("archive", [True, False])
def test_a_checkpoint_that_names_a_class_that_torch_declares_harmless_opens_no_port(tmp_path: Path, archive: bool):
    """The constructor of DeviceMesh starts a process group, which listens on every address."""
    import torch.distributed.tensor

    data = io.BytesIO()
    torch.save({}, data, _use_new_zipfile_serialization=archive)
    with zipfile.ZipFile(path := tmp_path / "it", "w") as file:
        file.writestr("it/data.pkl", DEVICE_MESH)
    payload = path.read_bytes() if archive else data.getvalue().replace(b"\x80\x02}q\x00.", DEVICE_MESH, 2)
    with pytest.raises(ValueError, match=r"holds more than data: torch\.distributed\.device_mesh\.DeviceMesh"):
        Checkpoints.decode(payload)
    assert not torch.distributed.is_initialized()


@pytest.mark.security
@pytest.mark.spark
def test_resuming_from_a_tampered_checkpoint_executes_nothing(spark, tmp_path: Path, monkeypatch):
    lightning = pytest.importorskip("lightning.pytorch")
    from horovod.spark.common.store import Store
    from horovod.spark.lightning import TorchEstimator

    class Line(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"own": Exploit(tmp_path / "own")}, logger=False)
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            return self.layer(x.float().reshape(-1, 1))

        def training_step(self, batch, _):
            return torch.nn.functional.mse_loss(self(batch["x"]), batch["y"].float().reshape(-1, 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    store, trap = Store.create(str(tmp_path / "store")), tmp_path / "trap"
    frame = spark.createDataFrame([(float(i), 2.0 * i) for i in range(16)], ["x", "y"])

    def fit(epochs: int):
        return TorchEstimator(
            num_proc=1, model=Line(), store=store, feature_cols=["x"], label_cols=["y"], batch_size=8, epochs=epochs,
            input_shapes=[[-1, 1]], run_id="run", verbose=0,
        ).fit(frame)  # fmt: skip

    fit(1)
    path = Path(store.get_checkpoint_path("run").removeprefix("file://"))
    content = torch.load(path, weights_only=False)
    content["hyper_parameters"] = {"own": Exploit(trap)}
    torch.save(content, path)
    assert [entry["epoch"] for entry in fit(2).getEpochs()] == [0, 1], "hyperparameters are not needed"
    content["callbacks"]["own"] = Exploit(trap)
    torch.save(content, path)
    for strict in "01":
        monkeypatch.setenv("HORA_STRICT", strict)
        with pytest.raises(
            ValueError, match=r"(?s)checkpoint of run run holds posix\.system.*HORA_TRUST_FILES=1|spark\.auth"
        ):
            fit(3)
    assert not trap.exists()


class Exploit:
    """Leaves a trace when unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.trap}",)


# A member of the job that implements the documented protocol (docs/protocol.md) and holds its own key. `LIES`: it sends
# each of these messages to the launcher on a separate connection before it does its work.
MEMBER = """
import os, pickle, socket, struct, sys
sys.path.insert(0, sys.argv[1])
import another_end

class Exploit:
    def __reduce__(self):
        return exec, (f"open({sys.argv[2]!r}, 'w').write('executed in the launcher')",)

def connect():
    env, worker = os.environ, int(os.environ["HORA_WORKER"])
    where = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    with open(env["HORA_SECRET_FILE"], "rb") as file:
        key = file.read()
    return another_end.Client(key, env["HORA_JOB"], worker).connect(socket.create_connection(where, timeout=30))

def said(text, payload=b""):
    return len(text).to_bytes(2, "big") + text.encode() + payload

"""
LIES = """
DEEP = '{"_n":0,"op":"get","x":' + "[" * 20000 + "]" * 20000 + "}"
NONSENSE = [b"", b"abc", b"\\xff" * 60000, said("[1]"), said("{}"), said('{"_n":-5,"op":"pong"}'), said(DEEP),
    said('{"_n":true,"op":"pong"}', b"x"), said('{"_n":1000000000000000000,"op":"pong"}'), said('{"_n":0,"op":[]}'),
    said('{"_n":0,"op":"get","id":1,"key":"k","timeout_s":Infinity}'), said('{"_n":0,"op":"set","key":"k"}'),
    said('{"_n":0,"op":"get","id":1e999,"key":"k","timeout_s":1e999}'),
    said('{"_n":0,"op":"check","id":1,"keys":null}'),
    said('{"_n":0,"op":"gather","id":1,"key":"k","rank":1e999,"size":20000000,"timeout_s":1}')]

if os.environ["HOROVOD_RANK"] == "1":
    for body in NONSENSE:
        member = connect()
        member.sock.sendall(member.out.frame(body))
        member.sock.settimeout(0.2)
        try:
            member.sock.recv(100)
        except OSError:
            pass
    member = connect()
    member.send({"op": "hello", "id": 1, "name": "x", "worker": -1})
    member.receive()
    for op in ("raised", "returned"):
        lie = {"op": op, "id": 2, "type": "X", "message": "m", "traceback": "t", "consequence": True}
        member.send(lie, pickle.dumps(Exploit()))
        member.receive()
    print("lied", flush=True)
"""


# A member that reports itself as late and answers the launcher's question with a stack that is none, and whose host has
# facts that are no numbers; then it works until the file exists.
LIAR = """
import os, pathlib, time
if os.environ["HOROVOD_RANK"] == "1":
    member = connect()
    sample = struct.pack("<BQI15f", 3, 5, 5, *[1.0] * 15)
    escapes = "\\x1b]52;c;cm0gLXJmIH4=\\x07"
    words = [("stall", b"[1]"), ("stack", b'{"threads":[[]]}'), ("stack", b"[" * 100000), ("nonsense", b""),
        ("report", sample + b'{"h": {"net_out": "x"}}'), ("report", sample + b'{"h": {"net_out": NaN}}'),
        ("report", sample + b'{"h": {"cpu": 0.5, "num_cpus": "[/x]"}}'), ("report", b"x" * 500000),
        ("report", sample + ('{"w": ["%s", 30.0, [0]], "e": [["note", "%s"]]}' % (escapes, escapes)).encode())]
    for kind, data in words:
        member.send({"op": "telemetry", "kind": kind, "worker": 1}, data)
    member.send({"op": "check", "id": 3, "keys": []})
    while "re" not in member.receive()[0]:
        pass
print("said", os.environ["HOROVOD_RANK"], flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.05)
"""


@pytest.mark.security
def test_words_of_a_member_end_neither_the_launcher_nor_its_page(tmp_path: Path):
    finish, unit = tmp_path / "finish", Path(__file__).parents[1] / "unit"
    (tmp_path / "log").touch(mode=0o600)  # so that the launcher prints the page's token
    line = [*HOROVODRUN, "-np", "2", "--dashboard", sys.executable, script(tmp_path, MEMBER + LIAR + MEET)]
    job = JobProcess([*line, str(unit), str(finish)], tmp_path)
    for rank in (0, 1):
        job.wait_for_text(f"said {rank}")
    address, token = re.findall(r"see it live: (\S+)#token=(\S+)", job.text())[0]
    for _ in range(2):
        top = subprocess.run(
            [str(BIN / "hora"), "top", "--once", address], input=token, capture_output=True, text=True, timeout=100
        )
        assert top.returncode == 0, top
        assert "2 ranks" in top.stdout
        assert "\x1b]" not in top.stdout
    finish.touch()
    assert job.wait() == 0, job.text()
    assert all(f"rank {rank} sum 2.0" in job.text() for rank in (0, 1)), job.text()
    assert "Traceback" not in job.text(), job.text()
    assert "\x1b" not in job.text()
    assert job.text().count("sends invalid telemetry") == 1, job.text()
    job.assert_nothing_left()


@pytest.mark.security
def test_a_member_that_sends_garbage_and_pickles_harms_only_itself(tmp_path: Path):
    trap, unit = tmp_path / "trap", Path(__file__).parents[1] / "unit"
    line = [*HOROVODRUN, "-np", "2", sys.executable, script(tmp_path, MEMBER + LIES + MEET), str(unit), str(trap)]
    job = JobProcess(line, tmp_path)
    status = job.wait()
    assert "lied" in job.text(), job.text()
    assert "Traceback" not in job.text(), job.text()
    assert all(f"rank {rank} sum 2.0" in job.text() for rank in (0, 1)), (status, job.text())
    assert not trap.exists()
    job.assert_nothing_left()
