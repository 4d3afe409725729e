"""What a cluster does to training runs: kills, signals, a stopped rank. Called by `make faults`."""
