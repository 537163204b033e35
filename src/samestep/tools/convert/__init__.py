"""From PaddleViT to Samestep: recipes and weights."""
