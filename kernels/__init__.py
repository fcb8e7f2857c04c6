"""The ops: contract, reference, and how each target computes them."""
