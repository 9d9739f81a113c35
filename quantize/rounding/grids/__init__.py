"""Types whose weights are rounded in groups, to points of a grid: IQ1, IQ2 and IQ3.

walks.py     a grid as a tree, and walks that judge all its points under feedback
octets.py    eight weights rounded, with what their type says of signs
kernels.py   blocks of 256 rounded, their scales chosen under feedback, and sub-blocks chosen anew
rounders.py  where each type keeps its indices, signs and scales, and the rounders
"""
