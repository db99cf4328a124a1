"""Data for the labs: the penguins, prepared by pandas or by Spark with the same rows as the result."""
