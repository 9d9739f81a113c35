"""Types whose weights are rounded in groups, to points of a grid: IQ1, IQ2 and IQ3.

layouts.py     where each type keeps its indices, signs and scales
walks.py       a grid as a tree, and walks that judge all its points under feedback
octets.py      eight weights rounded, with what their type says of signs
blocks.py      blocks of 256, their scales chosen under feedback
refinement.py  sub-blocks chosen anew once rows are complete
kernels.py     the kernels of blocks.py and refinement.py, for each kind of octet
rounders.py    the rounders
"""
