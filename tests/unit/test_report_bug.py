"""A bug report contains no secret of the variables, of URLs or of a log."""

from __future__ import annotations

import pytest

from hora.cli import doctor, report_bug


def test_a_report_has_versions_findings_and_logs_but_no_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "main", lambda argv: print("  ok   a finding"))
    environ = {
        "HORA_STORE": "etcd://trainer:hunter2@etcd-1:2379",
        "HOROVOD_SECRET_KEY": "a-key",
        "HORA_SECRET_FILE": "job.secret",
        "HOROVOD_LOG_LEVEL": "debug",
        "HOME_TOKEN": "not of ours",
    }
    monkeypatch.setattr(report_bug, "variables", lambda: environ)
    log = tmp_path / "stderr"
    log.write_text(
        "first line\n" * 400
        + "see it live: http://127.0.0.1:41873/#token=abc-DEF\nkey "
        + "0a" * 32
        + "\nAuthorization: Bearer1 x\n"
    )
    report_bug.main([str(log)])
    text = (tmp_path / "hora-report.txt").read_text()
    assert (tmp_path / "hora-report.txt").stat().st_mode & 0o777 == 0o600
    for wanted in (
        "0.28.1 (Hora ",
        "torch 2",
        "a finding",
        "HOROVOD_LOG_LEVEL=debug",
        "etcd://trainer:***@etcd-1",
        "300 lines",
    ):
        assert wanted in text
    for secret in ("hunter2", "a-key", "job.secret", "abc-DEF", "0a0a", "Bearer1", "not of ours"):
        assert secret not in text
    assert "read it before you send it" in capsys.readouterr().out
    with pytest.raises(ValueError, match="choose another name with --output"):
        report_bug.main([])
    with pytest.raises(ValueError, match="there is no file nothing"):
        report_bug.main(["nothing"])
