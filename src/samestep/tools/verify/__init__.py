"""`samestep verify`: the evidence that N processes compute what one does, and the cause where they do not."""
