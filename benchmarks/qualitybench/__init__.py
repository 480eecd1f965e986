"""What quantisation costs in quality: logits of artifacts and of GGUF files beside their own float32 run."""
