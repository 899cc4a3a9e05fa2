"""Who acts. ``catalog.load(name)`` turns a name into an agent; nothing heavy is imported before."""
