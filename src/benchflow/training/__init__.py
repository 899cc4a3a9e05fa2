"""The training seam: finished rollouts as rows, groups with advantages, and a stream."""
