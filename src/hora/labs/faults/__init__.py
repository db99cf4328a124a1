"""The faults lab: a training whose ranks are killed."""
