"""`horovod.runner.common.util.secret`: keys and digests for programs that authenticate messages of their own."""

from __future__ import annotations

import hmac
import secrets

__all__ = ["DIGEST_LENGTH", "HOROVOD_SECRET_KEY", "SECRET_LENGTH", "check_digest", "compute_digest", "make_secret_key"]

SECRET_LENGTH = 32
DIGEST_LENGTH = 32
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"  # the variable that Horovod's processes look for theirs in


def make_secret_key() -> bytes:
    """A fresh random key."""
    return secrets.token_bytes(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """HMAC-SHA256 of the message."""
    return hmac.digest(key, message, "sha256")


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Return whether the digest is the message's; the time it takes tells nothing about it."""
    return hmac.compare_digest(compute_digest(key, message), digest)
