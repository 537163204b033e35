"""From a recipe to built objects, and the recipes that ship."""
