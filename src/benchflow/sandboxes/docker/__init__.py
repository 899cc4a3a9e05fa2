"""Docker sandboxes: one container per rollout, driven through the engine's socket.

``engine.py`` is the connection, ``images.py`` makes images, ``provider.py`` makes sandboxes.
"""
