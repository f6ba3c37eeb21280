"""Runs inside a container as ``python3 -I -c <this text>``: takes the agent from standard input and becomes it.

Or it takes of the agent what a single program needs, and becomes that program (:func:`become_program`).

From the host come five lengths (4 bytes each, big-endian) and then a plan and a library's index (marshal, in a version
that every Python reads), the library's code, the agent compiled by the host's Python, and its source, for a Python that
cannot read the former.
Back go one byte when all of it is there, and a report: a length and JSON. Then the agent serves on the same two
descriptors. Standard library only; imports as little as it can, for that costs each start.

The library holds modules of the image's own standard library as the host has read them there: a boundary in which
each file costs milliseconds is spared those. A module that it holds is the same in all that a program can see. What is
not needed for a start may come compressed, and then only where zlib is built in.

``paths`` in the plan is what ``site`` would put on sys.path, where the host knows it and has left ``site`` out (-S).
"""

import marshal
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_modules: "dict[str, Any]" = sys.modules
_machinery = _modules["_frozen_importlib"]
_external = _modules["_frozen_importlib_external"]
_LOCKS = "_ModuleLockManager", "_ImportLockContext"
_LATER = "linecache", "traceback"


class NoLock:
    """In the place of the locks of the import machinery while there is one thread.

    Until 3.12 each of them asks for the time, and gVisor answers that by a system call in a sandbox's first seconds.
    """

    def __init__(self, name: object = None) -> None:
        """As for a lock that has one."""

    def __enter__(self) -> None:
        """Nothing is held."""

    def __exit__(self, *error: object) -> None:
        """Nothing is let go."""


class Library:
    """Finds the modules that came along: name -> (path, whether it is a package, where in ``code`` its code ends).

    The code begins where that of the module before ends, and is as in a .pyc; that of a shared object is empty.
    """

    def __init__(self, modules: "dict[str, tuple[str, bool, int, int]]", code: memoryview) -> None:
        self.modules = modules
        self.code = code
        self.locks = {name: getattr(_machinery, name) for name in _LOCKS if hasattr(_machinery, name)}
        sys.meta_path.insert(0, self)
        for name in self.locks:
            setattr(_machinery, name, NoLock)
        for name in _LATER:
            if name in modules:
                self.load_later(name)

    def find_spec(self, name: str, path: object = None, target: object = None) -> "Any":
        """As a finder of sys.meta_path does."""
        if name not in self.modules:
            return None
        file, package, start, end = self.modules[name]
        code = self.code[start:end]
        if not code:
            loader = _external.ExtensionFileLoader(name, file)
        else:
            loader = _external.SourceFileLoader(name, file)

            def get_code(_: str) -> object:
                del loader.get_code
                if code[0] != 0x78:  # b"x", the first byte of what zlib made, and never of a code object
                    return marshal.loads(code)
                import zlib

                return marshal.loads(zlib.decompress(code))

            loader.get_code = get_code
        folders = [file.rpartition("/")[0]] if package else None
        return _external.spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)

    def load_later(self, name: str) -> None:
        """Make the module, and run its code when something of it is wanted: most programs meet no error."""
        spec = self.find_spec(name)
        module = sys.modules[name] = _machinery.module_from_spec(spec)

        def load(attribute: str) -> object:
            del module.__getattr__
            lines = dict(module.cache) if name == "linecache" else {}
            spec.loader.exec_module(module)
            if lines:
                module.cache.update(lines)
            return getattr(module, attribute)

        module.__getattr__ = load
        if name == "linecache":
            module.cache = {}

    def close(self) -> None:
        """From here there may be threads. The modules stay to be found, as quickly as those that are loaded."""
        for name, lock in self.locks.items():
            setattr(_machinery, name, lock)


class Calls:
    """In the place of ``ctypes`` for the agent, which looks one call up when it starts; ctypes itself from then on."""

    starting = True

    def __getattr__(self, name: str) -> object:
        """While the agent starts, the C library, and nothing for types of arguments."""
        if self.starting:
            return CLibrary if name == "CDLL" else None
        return getattr(__import__("ctypes"), name)


class CLibrary:
    """What ``ctypes.CDLL(None)`` would be. Its functions take and return ints."""

    def __init__(self, name: None, use_errno: bool = False) -> None:
        """Of errors nothing is kept."""

    def __getattr__(self, name: str) -> object:
        """The function of that name."""
        import _ctypes

        own: Any = None
        address = _ctypes.dlsym(_ctypes.dlopen(own, 0), name)
        return lambda *arguments: _ctypes.call_function(address, arguments)


def take(size: int) -> memoryview:
    """Exactly ``size`` bytes of standard input."""
    data = memoryview(bytearray(size))
    left = data
    while left:
        try:
            count = os.readv(0, [left])
        except BlockingIOError:  # under gVisor the stream does not wait, whatever it was before
            wait = select.poll()
            wait.register(0, select.POLLIN)
            wait.poll()
            continue
        if not count:
            os._exit(0)
        left = left[count:]
    return data


def be_site(paths: "list[str]") -> None:
    """What is left of ``site`` where it was not run, and the host knows what it would have found."""
    import site

    site.ENABLE_USER_SITE = False
    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path += paths


def prepare(answers: int, calls: "Any" = None) -> "Any":
    """Take what the host sends, set this process up, and report on the descriptor ``answers``; the agent's module.

    ``calls``, where the library has a ``ctypes``, stands in its place while the agent starts.
    """
    lengths = take(20)
    sizes = [int.from_bytes(lengths[at : at + 4], "big") for at in range(0, 20, 4)]
    rest = take(sum(sizes))
    parts = []
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    plan, modules = marshal.loads(parts[0]), marshal.loads(parts[1])
    code, source = parts[3:]
    os.write(answers, b"R")  # received: what comes next may take as long as the preloaded modules take
    library = Library(modules if plan["library_magic"] == _external.MAGIC_NUMBER else {}, parts[2])
    import resource

    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    error, rlimits = "", {}
    agent = type(sys)("fumehood.guest.agent")
    try:
        if plan["python"] not in (None, python):
            raise RuntimeError(f"the environment is for Python {plan['python']} and the image has {python}")
        for name, value in plan["rlimits"].items():
            number = getattr(resource, "RLIMIT_" + name)
            if resource.getrlimit(number) != (value, value):  # gVisor lets nobody set some, and sets them itself
                resource.setrlimit(number, (value, value))
        rlimits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in plan["rlimits"]}
        if plan["paths"] is not None:
            be_site(plan["paths"])
        elif os.path.isdir(packages := f"/opt/env/lib/python{python}/site-packages"):
            sys.path.append(packages)
        if calls is not None and "ctypes" in library.modules:
            _modules["ctypes"] = calls
        same = plan["magic"] == _external.MAGIC_NUMBER
        exec(marshal.loads(code) if same else compile(bytes(source), "agent.py", "exec"), agent.__dict__)
        library.close()
        if _modules.get("ctypes") is calls is not None:
            del _modules["ctypes"]
            calls.starting = False
        for name in plan["preload"]:
            __import__(name)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    limits = ",".join(f'"{name}":[{soft},{hard}]' for name, (soft, hard) in rlimits.items())
    text = f'{{"python":"{python}","rlimits":{{{limits}}},"error":{quoted(error)}}}'.encode()
    text = len(text).to_bytes(4, "big") + text
    while text:
        text = text[os.write(answers, text) :]
    if error:
        os._exit(1)
    return agent


def quoted(text: str) -> str:
    """As a string of JSON's."""
    if not text:
        return '""'
    import _json

    return _json.encode_basestring_ascii(text)


def become_agent() -> None:
    """Prepare, and serve on the same two descriptors. Never returns."""
    agent = prepare(1, Calls())
    finder: Any = sys.meta_path[0]
    if "json" not in finder.modules:
        import json  # noqa: F401 - here, and not where a program's file may have taken its name
    os.umask(0o077)
    agent.serve(0, 1, "/work")


def become_program() -> None:
    """Prepare, take one program on descriptor 0, a socket, run it as this process, and exit. Never returns.

    The program finds an empty standard input there. Its head is three lengths (2, 4 and 4 bytes, big-endian) of its
    name, its environment and its code.
    """
    agent = prepare(0)
    os.umask(0o022)
    agent.prepare()
    main = agent.fresh_interpreter()
    head = take(10)
    name_bytes, env_bytes, code_bytes = (int.from_bytes(head[at:end], "big") for at, end in ((0, 2), (2, 6), (6, 10)))
    name, env, code = str(take(name_bytes), "utf-8"), bytes(take(env_bytes)), bytes(take(code_bytes))
    empty, end = os.pipe()
    os.dup2(empty, 0)
    os.close(empty)
    os.close(end)
    agent.set_environment(env)
    signals = agent._signal
    status = agent.EXIT_INTERRUPTED
    try:
        status = agent.run_code(code, name, main.__dict__, signals.default_int_handler)
        signals.signal(signals.SIGINT, signals.SIG_IGN)
    except KeyboardInterrupt:  # it came between the program's end and ours
        signals.signal(signals.SIGINT, signals.SIG_IGN)
    os._exit(agent.finalize(status, main.__dict__))


if __name__ == "__main__":
    become_agent()
