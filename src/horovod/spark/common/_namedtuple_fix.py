"""Imported by old notebooks for a repair that today's pyspark does not need."""
