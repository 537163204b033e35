"""Which samples a step is made of, and how they come to the rank that computes them."""
