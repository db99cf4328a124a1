"""Data for ranks (`converter`, `shard`) and for the labs (penguins, prepared by pandas or Spark; images)."""
