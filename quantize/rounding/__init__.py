"""Encoding with feedback: rows are rounded so that the errors of some columns make up for those of others.

An encoder of quantize.formats weighs the error of each column by itself. In a model, a row is multiplied by
inputs x, and the errors e of all its columns count together. With H the second moments of x, a row costs

    e H e^T = sum over columns i of ((w'[i] - v[i]) / U[i, i])**2,    H^-1 = U^T U, U upper triangular

where v are the values as stored and w' the weights after feedback: the error of each column has been taken
off the later ones. So columns are rounded from left to right, and each pays for itself alone. The bytes are
of the same types and sizes as the encoder's. A judge compares both, and rows that lose by feedback keep the
encoder's bytes.

In the order to read them:

    factor.py      H, U, and a rounder's view of some columns
    feedback.py    rows to bytes: from left to right, then sweeps that choose blocks anew
    products.py    the matrix products of feedback, in an order that no number of threads changes
    two_sided.py   a whole matrix to bytes, where gradients say which outputs matter
    judge.py       what encodings cost, and which rows keep the stock encoder's bytes
    base.py        what a type has to provide, how much is spent on the search, and the types that have it
    scalar/        the types whose weights are rounded one by one
    grids/         the types whose weights are rounded in groups, to points of a grid
"""
