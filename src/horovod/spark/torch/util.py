"""Models as text. Re-exports only."""

from hora.spark.estimator.text import (
    deserialize_fn,
    is_module_available,
    is_module_available_fn,
    save_into_bio,
    save_into_bio_fn,
    serialize_fn,
)

__all__ = [
    "deserialize_fn",
    "is_module_available",
    "is_module_available_fn",
    "save_into_bio",
    "save_into_bio_fn",
    "serialize_fn",
]
