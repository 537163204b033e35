"""How a model lives on devices: the canonical sum over shards, and one file a strategy."""
