"""`Settings` and `ElasticSettings` as Horovod's launchers pass them around; Hora reads neither."""

from __future__ import annotations

from typing import Any

__all__ = ["BaseSettings", "ElasticSettings", "Settings"]


class BaseSettings:
    """Attributes with Horovod's names and defaults. `key` is a secret and is not shown."""

    def __init__(
        self,
        num_proc: int | None = None,
        verbose: int = 0,
        ssh_port: int | None = None,
        ssh_identity_file: str | None = None,
        extra_mpi_args: str | None = None,
        tcp_flag: bool | None = None,
        binding_args: str | None = None,
        key: bytes | None = None,
        start_timeout: Any = None,
        output_filename: str | None = None,
        run_func_mode: bool | None = None,
        nics: Any = None,
        elastic: bool = False,
        prefix_output_with_timestamp: bool = False,
    ) -> None:
        self.__dict__.update({name: value for name, value in locals().items() if name not in ("self", "__class__")})

    def __repr__(self) -> str:
        shown = {name: "…" if name == "key" and value else value for name, value in vars(self).items()}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class Settings(BaseSettings):
    """Those of a job on fixed hosts."""

    def __init__(self, hosts: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = hosts


class ElasticSettings(BaseSettings):
    """Those of an elastic job. `discovery` stays behind when it is pickled: it belongs to the launcher's process."""

    def __init__(
        self,
        discovery: Any,
        min_num_proc: int | None,
        max_num_proc: int | None,
        elastic_timeout: float | None,
        reset_limit: int | None,
        cooldown_range: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(elastic=True, **kwargs)
        self.discovery = discovery
        self.min_num_proc, self.max_num_proc = min_num_proc, max_num_proc
        self.elastic_timeout, self.reset_limit = elastic_timeout, reset_limit
        self.cooldown_range = cooldown_range

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "discovery": None}
