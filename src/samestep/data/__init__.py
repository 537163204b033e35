"""Data order, datasets, loading and transfer of microbatches."""
