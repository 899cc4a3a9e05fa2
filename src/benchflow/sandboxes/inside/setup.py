"""Makes a fresh root file system ready: the agent's account, workspace and log folders."""

import posix

from users import accounts, find_user
from wire import read_file

FIRST_UID = 1000


def prepare(plan):
    """Carry out the plan and return ``(uid, gid, home)`` of the agent."""
    for path, mode in (("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/etc", 0o755)):
        make_dirs(path)
        if posix.stat(path).st_mode & 0o7777 != mode and path != "/etc":
            posix.chmod(path, mode)
    if not read_file("/etc/hosts"):
        write("/etc/hosts", b"127.0.0.1\tlocalhost\n::1\tlocalhost\n")
    uid, gid, home = 0, 0, "/root"
    make_dirs("/root", 0o700)
    if plan["agent"]:
        uid, gid, home = agent_account(plan["agent"], plan["users"])
        make_dirs(home)
        own(home, uid, gid)
    for path, user, group in (("/logs", 0, 0), ("/logs/agent", uid, gid), ("/logs/verifier", 0, 0)):
        make_dirs(path)
        own(path, user, group)
    make_dirs("/logs/artifacts")
    own("/logs/artifacts", uid, gid)
    make_dirs(plan["workdir"])
    if plan["fresh"]:  # a snapshot's files belong to whom they belonged
        own_tree(plan["workdir"], uid, gid)
    return uid, gid, home


def agent_account(name, users):
    """Find the account, or add it with the first free uid from 1000. With one mapped uid
    the agent is an alias of root."""
    taken, groups = set(), set()
    for fields in accounts("/etc/passwd"):
        if fields[0] == name:
            uid, gid, _, _, home = find_user(name)
            return uid, gid, home
        taken.add(int(fields[2]))
    for fields in accounts("/etc/group"):
        groups.add(int(fields[2]))
    uid = 0
    if users:
        uid = FIRST_UID
        while uid in taken or uid in groups:
            uid += 1
    home = f"/home/{name}"
    shell = "/bin/bash" if exists("/bin/bash") else "/bin/sh"
    append("/etc/passwd", f"{name}:x:{uid}:{uid}::{home}:{shell}\n", "root:x:0:0:root:/root:/bin/sh\n")
    append("/etc/group", f"{name}:x:{uid}:\n", "root:x:0:\n")
    return uid, uid, home


def append(path, line, first):
    text = read_file(path).decode("utf-8", "surrogateescape") or first
    if not text.endswith("\n"):
        text += "\n"
    write(path, (text + line).encode("utf-8", "surrogateescape"))


def write(path, data):
    """Replace a file by a new one, as a link there may lead anywhere."""
    try:
        posix.unlink(path)
    except FileNotFoundError:
        make_dirs(path.rpartition("/")[0] or "/")
    fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644)
    while data:
        data = data[posix.write(fd, data) :]
    posix.close(fd)


def exists(path):
    try:
        posix.stat(path)
    except OSError:
        return False
    return True


def make_dirs(path, mode=0o755):
    try:
        posix.mkdir(path, mode)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_dirs(path.rpartition("/")[0] or "/")
        posix.mkdir(path, mode)


def own(path, uid, gid):
    status = posix.lstat(path)
    if (status.st_uid, status.st_gid) != (uid, gid):
        posix.chown(path, uid, gid, follow_symlinks=False)


def own_tree(path, uid, gid):
    """Give a tree to the agent, touching only what is not its own: a change of owner makes
    the overlay copy the file."""
    own(path, uid, gid)
    with posix.scandir(path) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                own_tree(item.path, uid, gid)
            else:
                own(item.path, uid, gid)
