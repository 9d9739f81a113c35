"""Laguna and MiMo-V2: layers with a window have other heads than those without."""
