"""Files on the disk: inputs that must not change, outputs that appear whole, journals and locks."""
