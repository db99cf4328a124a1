"""Objects as text, under the old name. Loading such a text can run any code. Re-exports only."""

from hora.horovod.codec import dumps_base64, loads_base64

__all__ = ["dumps_base64", "loads_base64"]
