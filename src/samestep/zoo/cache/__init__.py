"""Cache of decoded or encoded samples on the local disk."""
