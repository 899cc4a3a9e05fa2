"""The engine: tree, lifecycle, scenes, storage. Depends on contracts only."""
