"""Observation of a job: the live page, `hora top`, recorded runs and `/metrics`, from the ranks' telemetry."""
