"""Tar as the helper needs it: unpack the engine's own streams, pack what it asks for.

The engine writes PAX streams whose top entry is ``.``; it reads the same and trusts
nothing in them. Data flows through descriptors 0 and 1.
"""

import posix

BLOCK = 512
CHUNK = 1 << 18
FILE, LINK, SYMLINK, DIRECTORY, SPECIAL = b"0", b"1", b"2", b"5", b"6"
S_IFMT, S_IFREG, S_IFDIR, S_IFLNK = 0o170000, 0o100000, 0o040000, 0o120000


# --- in -------------------------------------------------------------------------------


def unpack(path, uid, gid):
    """Write the stream on stdin to ``path``. A directory merges into one that is there; a
    file replaces a file, or goes nowhere when ``path`` is a directory."""
    folders = []
    while True:
        name, kind, mode, mtime, size, target = read_header()
        if name is None:
            break
        place = path if name == "." else f"{path}/{name}"
        if kind == DIRECTORY:
            if make_folder(place, uid, gid, top=name == "."):
                folders.append((place, mode, mtime))
        elif kind == SYMLINK:
            clear(place)
            posix.symlink(target, place)
            posix.chown(place, uid, gid, follow_symlinks=False)
        elif kind == FILE:
            if name == ".":
                make_parents(path)
            write_file(place, mode, mtime, size, uid, gid)
        else:
            raise OSError(f"unexpected entry {name!r}")
    for place, mode, mtime in reversed(folders):
        posix.chmod(place, mode)
        posix.utime(place, (mtime, mtime))


def read_header():
    """``(name, type, mode, mtime, size, link target)``; name None at the end."""
    extended = {}
    while True:
        block = exactly(BLOCK)
        if block == bytes(BLOCK):
            while posix.read(0, CHUNK):
                pass
            return None, None, 0, 0, 0, ""
        size = octal(block[124:136])
        kind = block[156:157]
        if kind == b"x":
            data = exactly(size)
            exactly(-size % BLOCK)
            extended.update(pax_records(data))
            continue
        name = text(block[:100])
        if block[257:262] == b"ustar" and block[345]:
            name = f"{text(block[345:500])}/{name}"
        name = extended.get("path", name).rstrip("/") or "."
        target = extended.get("linkpath", text(block[157:257]))
        size = int(extended.get("size", size)) if kind in (FILE, b"\0") else 0
        mtime = float(extended.get("mtime", octal(block[136:148])))
        return name, FILE if kind == b"\0" else kind, octal(block[100:108]), mtime, size, target


def pax_records(data):
    records = {}
    while data:
        length, _, _ = data.partition(b" ")
        record, data = data[len(length) + 1 : int(length) - 1], data[int(length) :]
        key, _, value = record.partition(b"=")
        records[text(key)] = text(value)
    return records


def octal(field):
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    return int(field.strip(b" \0") or b"0", 8)


def text(field):
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def exactly(size):
    parts = []
    while size:
        part = posix.read(0, min(size, CHUNK))
        if not part:
            raise OSError("the archive is cut off")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_file(place, mode, mtime, size, uid, gid):
    clear(place)
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW
    fd = posix.open(place, flags, 0o600)
    left = size
    while left:
        data = posix.read(0, min(left, CHUNK))
        if not data:
            raise OSError("the archive is cut off")
        left -= len(data)
        write_all(fd, data)
    posix.chown(fd, uid, gid)
    posix.chmod(fd, mode)
    posix.utime(fd, (mtime, mtime))
    posix.close(fd)
    exactly(-size % BLOCK)


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]


def clear(place):
    """Make room for a file or link; a directory there is an error, not a victim."""
    try:
        posix.unlink(place)
    except FileNotFoundError:
        pass


def make_parents(path):
    parent = path.rstrip("/").rpartition("/")[0]
    if parent:
        try:
            posix.mkdir(parent, 0o755)
        except FileExistsError:
            pass
        except FileNotFoundError:
            make_parents(parent)
            posix.mkdir(parent, 0o755)


def make_folder(place, uid, gid, top):
    """True for a new folder, which belongs to ``uid``; one that is there stays as it is.
    Only the top may be a link to a folder."""
    try:
        posix.mkdir(place, 0o700)
    except FileNotFoundError:
        make_parents(place)
        posix.mkdir(place, 0o700)
    except FileExistsError:
        status = posix.stat(place) if top else posix.lstat(place)
        if status.st_mode & S_IFMT == S_IFDIR:
            return False
        posix.unlink(place)
        posix.mkdir(place, 0o700)
    posix.chown(place, uid, gid)
    return True


# --- out ------------------------------------------------------------------------------


def pack(path):
    """Write ``path`` to stdout under the top name ``.``. Of special files only the name goes."""
    status = posix.stat(path)
    if status.st_mode & S_IFMT == S_IFREG:
        pack_file(path, ".", status)
    elif status.st_mode & S_IFMT == S_IFDIR:
        write_all(1, header(".", DIRECTORY, status))
        pack_folder(path, "")
    else:
        raise OSError(f"{path} is neither a file nor a directory")
    write_all(1, bytes(2 * BLOCK))


def pack_folder(path, prefix):
    for name in sorted(posix.listdir(path)):
        place = f"{path}/{name}"
        inner = prefix + name
        try:
            status = posix.lstat(place)
            kind = status.st_mode & S_IFMT
            if kind == S_IFDIR:
                write_all(1, header(inner, DIRECTORY, status))
                pack_folder(place, f"{inner}/")
            elif kind == S_IFLNK:
                write_all(1, header(inner, SYMLINK, status, target=posix.readlink(place)))
            elif kind == S_IFREG:
                pack_file(place, inner, status)
            else:
                write_all(1, header(inner, SPECIAL, status))
        except FileNotFoundError:
            continue  # it went away meanwhile


def pack_file(place, name, status):
    """The size is fixed when the file is opened: one that shrinks is padded with zeros."""
    fd = posix.open(place, posix.O_RDONLY | posix.O_NOFOLLOW * (name != ".") | posix.O_NONBLOCK)
    status = posix.fstat(fd)
    if status.st_mode & S_IFMT != S_IFREG:
        posix.close(fd)
        return
    write_all(1, header(name, FILE, status, size=status.st_size))
    left = status.st_size
    while left:
        data = posix.read(fd, min(left, CHUNK)) or bytes(min(left, CHUNK))
        write_all(1, data)
        left -= len(data)
    posix.close(fd)
    write_all(1, bytes(-status.st_size % BLOCK))


def header(name, kind, status, size=0, target=""):
    raw_name, raw_target = encode(name), encode(target)
    extended = b""
    if len(raw_name) > 100:
        extended += pax_record(b"path", raw_name)
    if len(raw_target) > 100:
        extended += pax_record(b"linkpath", raw_target)
    if size >= 1 << 33:
        extended += pax_record(b"size", b"%d" % size)
    front = b""
    if extended:
        front = ustar(b"pax", b"x", 0o644, len(extended), 0, b"") + extended + bytes(-len(extended) % BLOCK)
    shown = 0 if size >= 1 << 33 else size
    mtime = max(0, int(status.st_mtime))
    return front + ustar(raw_name[:100], kind, status.st_mode & 0o7777, shown, mtime, raw_target[:100])


def ustar(name, kind, mode, size, mtime, target):
    numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, min(mtime, (1 << 33) - 1))
    front = name.ljust(100, b"\0") + numbers
    back = kind + target.ljust(100, b"\0") + b"ustar\x0000"
    block = (front + b" " * 8 + back).ljust(BLOCK, b"\0")
    return front + b"%06o\0 " % sum(block) + block[len(front) + 8 :]


def pax_record(key, value):
    size = len(key) + len(value) + 3
    total = size
    while (longer := size + len(b"%d" % total)) != total:  # the length counts its own digits
        total = longer
    return b"%d %s=%s\n" % (total, key, value)


def encode(name):
    return name.encode("utf-8", "surrogateescape")
