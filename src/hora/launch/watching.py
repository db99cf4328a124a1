"""Observation of a job, from the user's settings to the controller's observer; imports `hora.watch` on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hora.watch import live
    from hora.watch.kubeflow import Controller

__all__ = ["Watching"]


@dataclass(frozen=True, kw_only=True)
class Watching:
    """`page`: live, at `listen` (host:port; loopback and a free port unless given). `record`: a file for `hora view`.

    `controller`: Kubeflow's, which wants to know how far the job is. `browser`: open the page there. `demo`: the page
    offers to kill ranks.
    """

    page: bool = False
    listen: str = ""
    record: str | None = None
    controller: Controller | None = None
    browser: bool = False
    demo: bool = False

    @classmethod
    def wanted(
        cls,
        environ: Mapping[str, str],
        *,
        page: bool | None = None,
        listen: str | None = None,
        record: str | None = None,
    ) -> Watching | None:
        """Read the settings from arguments, from HORA_DASHBOARD (1, 0, or the address) and HORA_RECORD, or by
        Kubeflow's variables; None: nothing.
        """
        setting = environ.get("HORA_DASHBOARD", "")
        if page is None:
            page = setting not in ("", "0") or bool(listen)
        if not listen and setting not in ("", "0", "1"):
            listen = setting
        record = record or environ.get("HORA_RECORD") or None
        controller = _controller(environ) if "KUBEFLOW_TRAINER_SERVER_URL" in environ else None
        if not page and not record and controller is None:
            return None
        return cls(page=page, listen=listen or "", record=record, controller=controller)

    def open(self, facts: Mapping[str, Any], job: live.Job) -> live.Dashboard:
        """Begin to observe a job. `facts`: what it is; `job`: what may be done to it. OSError: the address is taken."""
        from hora.watch.live import Dashboard

        dashboard = Dashboard(
            {**facts, "demo": True} if self.demo else facts,
            job,
            listen=self.listen,
            record=self.record,
            page=self.page,
            controller=self.controller,
        )
        if self.page and self.browser:
            import webbrowser

            webbrowser.open(dashboard.page.full_url)
        return dashboard


def _controller(environ: Mapping[str, str]) -> Controller | None:
    from hora.watch.kubeflow import Controller

    return Controller.of(environ)
