"""The cores with bodies to fill in: docs/exercise.md."""
