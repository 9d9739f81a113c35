"""A finished file made again, tensor by tensor, and compared byte for byte; no model is written."""
