"""What `fuse_attention` reads: scores, heads and masks, element by element, and the proof that a mask is
causal."""
