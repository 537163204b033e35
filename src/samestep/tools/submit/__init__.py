"""Jobs of other systems: files and one command as a function of recipe and resources, without their libraries."""
