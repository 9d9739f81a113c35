"""The types whose weights are rounded in groups, to points of a grid: IQ1, IQ2 and IQ3.

trees.py       a grid as a tree of common beginnings
walks.py       all points of a grid judged under feedback
octets.py      eight weights rounded, with what their type says of signs
blocks.py      the kernels: blocks of 256, their scales chosen under feedback
refinement.py  the kernels that choose sub-blocks anew once rows are complete
layouts.py     where each type keeps its indices, signs and scales
rounders.py    the rounders
"""
