"""A model family that exists in tests alone: plain attention, dense layers, rotated rows in another order.

Tests register its module in convert.architectures.MODULES. It is small, and it needs what DeepSeek
does not: rows that change places, no experts, and an option of its own.
"""
