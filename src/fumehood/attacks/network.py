"""Group D: the host's network, and what it listens to."""

from __future__ import annotations

from fumehood.attacks import watch
from fumehood.attacks.model import Attack
from fumehood.model import Boundary

_G = "network"

_DIAL = """
with trying:
    with socket.create_connection({where}, timeout=1) as peer:
        peer.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        say(peer.recv(4096))
"""

ATTACKS = (
    Attack(
        "D1", _G, "a service on the host's loopback", _DIAL.format(where='("127.0.0.1", T.ports["tcp4"])'),
        watch.reached("tcp4"), "the article's six", proves=("net_ns",),
    ),
    Attack(
        "D1b", _G, "a service on ::1", _DIAL.format(where='("::1", T.ports["tcp6"])'),
        watch.reached("tcp6"), proves=("net_ns",), needs=("ipv6",),
    ),
    Attack(
        "D1c", _G, "a service on the host's own address", _DIAL.format(where='(T.address, T.ports["host4"])'),
        watch.reached("host4"), proves=("net_ns",), needs=("host_address",),
    ),
    Attack(
        "D1d", _G, "loopback by the address 0.0.0.0", _DIAL.format(where='("0.0.0.0", T.ports["tcp4"])'),
        watch.reached("tcp4"), "0.0.0.0-day, 2024", proves=("net_ns",),
    ),
    Attack(
        "D9", _G, "loopback by an IPv4 address inside IPv6",
        _DIAL.format(where='("::ffff:127.0.0.1", T.ports["tcp4"])'),
        watch.reached("tcp4"), proves=("net_ns",), needs=("ipv6",),
    ),
    Attack(
        "D2", _G, "a Unix socket of the host, by its path",
        """
with trying:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(T.socket_path)
    say(peer.recv(4096))
""",
        watch.reached("path"), "CVE-2019-5736 class (docker.sock)",
    ),
    Attack(
        "D2b", _G, "a Unix socket of the host, by its abstract name",
        """
with trying:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect("\\0" + T.abstract)
    say(peer.recv(4096))
""",
        watch.reached("abstract"), "CVE-2020-15257",
    ),
    Attack(
        "D2c", _G, "a Unix socket of the host through the operator's read-only mount",
        """
with trying:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(T.mounted + "/service")
    say(peer.recv(4096))
""",
        watch.reached("path"), "unix(7): connect asks the inode, not the mount, of any shared kernel",
        Boundary.USER_KERNEL,
    ),
    Attack(
        "D5", _G, "a datagram to the host's loopback",
        """
with trying:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"\\0" * 12, ("127.0.0.1", T.ports["udp4"]))
time.sleep(0.1)
""",
        watch.reached("udp4"), proves=("net_ns",),
    ),
    Attack(
        "D5b", _G, "a raw socket",
        """
keep = []
with trying:
    keep.append(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
hold()
""",
        watch.holds_socket_kind(2, 3), needs=("net_raw",),
    ),
    Attack(
        "D21", _G, "a service on loopback for the host to meet",
        """
with trying:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 20000 + T.key % 10000))
    server.listen()
hold()
""",
        watch.dials("loopback"), proves=("net_ns",),
    ),
    Attack(
        "D21b", _G, "an abstract Unix socket for the host to meet",
        """
with trying:
    server = socket.socket(socket.AF_UNIX)
    server.bind("\\0in-" + T.token)
    server.listen()
hold()
""",
        watch.dials("abstract"),
    ),
    Attack(
        "D21c", _G, "a service on loopback for another sandbox to meet",
        """
with trying:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", 20000 + T.key % 10000))
    server.listen()
    mark("fh-done")
    server.settimeout(6)
    peer, _ = server.accept()
    peer.sendall(T.note.encode())
hold()
""",
        watch.printed_note(), second=_DIAL.format(where='("127.0.0.1", 20000 + T.key % 10000)'), second_when="beside",
        proves=("net_ns",),
    ),
    Attack(
        "D21d", _G, "an abstract Unix socket for another sandbox to meet",
        """
with trying:
    server = socket.socket(socket.AF_UNIX)
    server.bind("\\0in-" + T.token)
    server.listen()
    mark("fh-done")
    server.settimeout(6)
    peer, _ = server.accept()
    peer.sendall(T.note.encode())
hold()
""",
        watch.printed_note(), "CVE-2020-15257", second_when="beside",
        second="""
with trying:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect("\\0in-" + T.token)
    say(peer.recv(4096))
""",
    ),
    Attack(
        "D26", _G, "the host's connections in /proc/net/tcp",
        """
for path in ("/proc/net/tcp", "/proc/self/net/tcp", "/proc/1/net/tcp"):
    with trying:
        for word in open(path).read().split():
            say("<<" + word + ">>")
""",
        watch.printed_fact("listening socket", watch.listening_inode), proves=("net_ns",),
    ),
    Attack(
        "D27", _G, "the names of the host's abstract sockets in /proc/net/unix",
        """
for path in ("/proc/net/unix", "/proc/self/net/unix", "/proc/1/net/unix"):
    leak(path)
""",
        watch.printed("name"), "CVE-2020-15257", proves=("net_ns",),
    ),
    Attack(
        "D28", _G, "the host's interfaces, asked of the kernel",
        """
with trying:
    for _, name in socket.if_nameindex():
        say("<<" + name + ">>")
""",
        watch.printed_fact("second network interface", watch.second_interface), needs=("host_address",),
    ),
)  # fmt: skip
