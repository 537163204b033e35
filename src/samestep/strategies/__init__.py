"""Division of a model among devices, and the sums of its gradients."""
