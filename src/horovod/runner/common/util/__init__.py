"""Old import paths of the launcher."""
