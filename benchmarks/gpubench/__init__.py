"""One GPU measured: kernels beside their bounds and torch's, and steps of models beside torch.compile."""
