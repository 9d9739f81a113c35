"""Importance matrices: which columns of a model's weights matter.

>>> import imatrix
>>> matrix = imatrix.load("model.imatrix")  # either format
>>> matrix.entries["blk.1.ffn_up_exps.weight"].shape  # experts, columns
(16, 256)
>>> imatrix.save("model.imatrix.dat", matrix)
"""

from gguf_tools.lazy import public_names

__all__, __getattr__, __dir__ = public_names(__name__)
