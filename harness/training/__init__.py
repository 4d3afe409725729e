"""Says what is trained, on which text, and in which ways: the stages, the baseline, the peers."""
