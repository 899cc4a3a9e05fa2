"""Reading task packages: native ``task.md`` and the split layout, to one ``contracts.task.Task``."""
