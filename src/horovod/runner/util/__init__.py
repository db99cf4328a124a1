"""Old import paths of the launcher's tools."""
