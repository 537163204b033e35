"""What a careful person checks before training on several devices."""
