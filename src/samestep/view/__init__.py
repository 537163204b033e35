"""Global view: every process sees whole batches, and the calls of models are divided between them."""
