"""Telemetry of each rank, and its transfer to the launcher."""

from hora.telemetry.meters import Meter, meter
from hora.telemetry.sample import PARTS, Report, Sample

__all__ = ["PARTS", "Meter", "Report", "Sample", "meter"]
