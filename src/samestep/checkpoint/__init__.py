"""What a run is resumed from: complete or not there, verified before it is loaded, free of ranks and of pickle."""
