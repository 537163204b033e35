"""Text datasets and models: next-token prediction and classification."""
