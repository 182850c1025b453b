"""The right answer in float64, and how far off is too far."""
