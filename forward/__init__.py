"""The forward pass of DeepSeek V2 and V3, layer by layer, in torch."""
