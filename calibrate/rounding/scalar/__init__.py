"""Types whose weights are rounded one by one: a weight is slope * level - low, of one of a few levels.

blocks.py         what a block stores, as arrays
rounding.py       the kernel: levels and scales of a block of columns, with feedback
refinement.py     the kernel that chooses sub-blocks anew, and the fit of d and dmin
rounder.py        the rounder that goes with a layout
k_quants.py       the layouts of types with integer scales
single_scales.py  the layouts of types with one float16 scale a block
fp4.py            the layouts of 4-bit floats
"""
