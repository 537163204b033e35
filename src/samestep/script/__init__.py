"""Scripts that know one device, on several processes."""
