"""Small loops as users write them, each with one expected outcome on 1, 2, 3 and 4 processes."""
