"""Jobs whose ranks are the tasks of a Spark stage."""
