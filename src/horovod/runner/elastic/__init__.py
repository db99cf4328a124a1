"""Old import paths of elastic jobs."""
