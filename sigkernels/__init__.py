"""Multi-label output layers: fused losses, heads that can predict every label set, and proofs."""
