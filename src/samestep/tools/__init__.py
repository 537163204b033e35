"""Tools that verify and explain runs: each uses the driver of recipes from outside."""
