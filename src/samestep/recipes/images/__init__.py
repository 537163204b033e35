"""Images with a class each: folders, lists and saved datasets."""
