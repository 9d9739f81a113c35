"""The forward pass of a model, layer by layer in torch: its activations are observed, its logits visited."""
