"""The run: layer by layer, gather statistics, encode what they are for, and forget them."""
