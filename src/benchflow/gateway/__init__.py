"""The door between agents and models: routes, upstreams, exact tokens, capture, the scripted model."""
