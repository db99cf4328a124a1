"""Observe a job: the live page, `hora top`, recorded runs, `/metrics`, from what ranks report."""
