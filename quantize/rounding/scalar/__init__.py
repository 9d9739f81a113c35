"""Types whose weights are rounded one by one: a weight is slope * level - low, of one of a few levels.

blocks.py   what a block stores, as arrays
rounder.py  the rounder that goes with a layout: its kernels, and the fit of d and dmin
layouts.py  the layouts of all types
"""
