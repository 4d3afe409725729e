"""What measuring and training need and no stage may know."""
