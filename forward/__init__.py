"""The forward pass of a model, layer by layer in torch: for whoever watches activations or reads logits."""
