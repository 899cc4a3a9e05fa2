"""Schema versions of what this plane writes. A reader refuses a newer one."""

ROW_VERSION = 1
STREAM_VERSION = 1
MANIFEST_VERSION = 1
