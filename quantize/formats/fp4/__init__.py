"""MXFP4 and NVFP4: floats of 4 bits."""
