"""How good is a quantized model? Divergence from its base, where it drifts away, and pages that show it."""
