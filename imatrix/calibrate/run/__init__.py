"""The run: layer by layer, gather statistics, encode under them, and forget them."""
