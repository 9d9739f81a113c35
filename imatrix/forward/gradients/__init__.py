"""The backward pass: gradients of the model's own predictions, layer by layer."""
