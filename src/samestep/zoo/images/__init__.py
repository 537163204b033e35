"""Classification datasets of images: class folders, lists and saved datasets of Hugging Face."""
