"""Texts with a class each, and models that guess the next token."""
