"""What proves and explains: each tool uses the trainer or the engine from outside."""
