"""Encoding that compensates its own errors: blocks chosen under the second moments of a tensor's inputs.

An encoder of quantize.formats weighs the error of each column by itself. Here errors of two columns count
together, as they do in the model: what is lost in one column is made up for in later ones. The bytes are of
the same types and sizes.

    factor.py      second moments in the form that rounding reads
    base.py        what a type has to provide, and how much is spent on the search
    rounders.py    the types that have it
    feedback.py    rows to bytes
    refine.py      complete rows made better
    two_sided.py   a whole matrix to bytes, where gradients say which outputs matter
    products.py    the matrix products of feedback, in an order that no number of threads changes
    scalar/        the types whose weights are rounded one by one
    grids/         those whose weights are rounded in groups, to points of a grid
"""
