"""Wrong optimizers. The contract must refuse each of them, or it proves nothing."""
