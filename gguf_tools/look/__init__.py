"""Looking into files: what they hold, whether it is sound, and how two files differ."""
