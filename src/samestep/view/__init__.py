"""Global view: processes see whole batches, and divide the calls of models between them."""
