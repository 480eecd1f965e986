"""What `fuse_rope` recognises: pairs of elements and the angles that they are rotated by."""
