"""Users of the sandbox, as its own files tell."""

import posix

from wire import Failure, read_file


def accounts(path):
    """The colon-separated records of passwd or group."""
    for line in read_file(path).decode("utf-8", "surrogateescape").splitlines():
        fields = line.split(":")
        if len(fields) >= 3 and fields[2].isdigit():
            yield fields


def find_user(user):
    """``(uid, gid, groups, name, home)`` of a name, ``uid`` or ``uid:gid``; None is root."""
    wanted, _, group = (user or "0").partition(":")
    name, home, uid, gid = wanted, "/", None, 0
    for fields in accounts("/etc/passwd"):
        if len(fields) >= 6 and (fields[0] == wanted or (wanted.isdigit() and fields[2] == wanted)):
            name, uid, gid, home = fields[0], int(fields[2]), int(fields[3]), fields[5] or "/"
            break
    if uid is None:
        if wanted == "root":
            uid = 0
        elif wanted.isdigit():
            uid = gid = int(wanted)
        else:
            raise Failure(f"no user {wanted!r} in the sandbox")
        home = "/root" if uid == 0 else "/"
    groups = [gid]
    for fields in accounts("/etc/group"):
        if len(fields) >= 4 and name in fields[3].split(","):
            groups.append(int(fields[2]))
        if group and fields[0] == group:
            gid = int(fields[2])
    if group.isdigit():
        gid = int(group)
    return uid, gid, sorted(set(groups)), name, home


def become(uid, gid, groups):
    """Switch for good. Leaving uid 0 drops every capability."""
    try:
        posix.setgroups(groups)
    except PermissionError:
        if uid or gid:  # with a single mapped uid there is nothing to switch to
            raise
    posix.setresgid(gid, gid, gid)
    posix.setresuid(uid, uid, uid)
