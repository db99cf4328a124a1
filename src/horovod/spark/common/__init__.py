"""What the estimators share. Re-exports only."""
