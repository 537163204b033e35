"""What a run leaves behind and shows: every listener hears the same events, in one process."""
