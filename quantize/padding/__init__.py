"""Sizes of a model made longer with zeros, so that rows are whole blocks of 256, and made shorter again.

A feed-forward block multiplies act(gate) by up, element by element, and then by down. Rows of zeros at the
end of gate and up give act(0) * 0 = 0, and columns at the end of down multiply nothing else. The model
computes the same numbers, bit for bit, with an inner size that a K- or IQ-type can hold.

    inner_sizes  which sizes a model has, which metadata key gives each, and which tensors have them
    padding      what the sizes become: shapes, metadata, rows
    choose       which of them are worth it for the types that are asked for
    hidden_size  the same for hidden states, which costs speed and memory too
    resized      rows of a tensor with zeros at their end, or without
    counterparts the sizes of a padded file beside those of the model
    matrix       importances of one for the other
"""
