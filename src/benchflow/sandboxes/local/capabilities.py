"""The capabilities processes in a sandbox may have: the usual set of a container.

They are valid only inside the sandbox's user namespace. CAP_SYS_ADMIN, CAP_SYS_PTRACE,
CAP_NET_ADMIN and CAP_DAC_READ_SEARCH are not among them.
"""

KEPT = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_RAW": 13,
    "SYS_CHROOT": 18,
    "MKNOD": 27,
    "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}
"""Name and number of each."""

MASK = sum(1 << number for number in KEPT.values())
