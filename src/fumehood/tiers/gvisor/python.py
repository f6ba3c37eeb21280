"""How the Python of an image is started, where what it would look for by itself is known beforehand.

Under gVisor each look at a file is half a millisecond and each opened file some three, and ``site`` looks at ten.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fumehood.images.store import Image
from fumehood.tiers.container import payload
from fumehood.tiers.container.spec import PACKAGES

_PATH = "/usr/bin/python3"
_LOCALES = "usr/lib/locale"
#: All that Debian's sitecustomize.py does.
_CUSTOMIZE = """
try:
    import apport_python_hook
except ImportError:
    pass
else:
    apport_python_hook.install()
"""


@dataclass(frozen=True, slots=True)
class Start:
    """The arguments of the sandbox's first process, and what it is told by :func:`payload.message`."""

    arguments: tuple[str, ...]
    env: tuple[str, ...] = ()  # beside what every program gets, until the agent forks
    paths: tuple[str, ...] | None = None
    same_python: bool = False


def usual(*, single: bool = False) -> Start:
    """What works with any Python. ``single``: to become a single program and not the agent."""
    return Start(("python3", "-I", "-c", payload.program_bootstrap() if single else payload.bootstrap()))


@lru_cache(maxsize=32)
def of(image: Image, magic: bytes, *, environment: bool, single: bool = False) -> Start:
    """The quickest start of ``image``, whose .pyc files begin with ``magic`` (b"" if that is not known).

    ``environment``: one of ours is shown inside. Other folders of the host's are so below /mnt, where no Python looks.
    ``single``: see :func:`usual`.
    """
    if not magic or not (image.rootfs / _PATH[1:]).is_file():
        return usual(single=single)
    same = magic == importlib.util.MAGIC_NUMBER
    if single:
        text = payload.compiled_program_bootstrap() if same else payload.program_bootstrap()
    else:
        text = payload.compiled_bootstrap() if same else payload.bootstrap()
    # Without the files of LANG's locale Python ends up with "C" in UTF-8 mode after it has looked for six of them.
    env = () if (image.rootfs / _LOCALES).exists() else ("LC_ALL=C",)
    found = site_paths(image)
    if found is None:
        return Start((_PATH, "-I", "-c", text), env, None, same)
    own = [PACKAGES.format(image.python)] if environment or image.environment else []
    return Start((_PATH, "-I", "-S", "-c", text), env, (*found, *own), same)


def site_paths(image: Image) -> tuple[str, ...] | None:
    """What Debian's ``site`` adds to sys.path in ``image``; None if it would do more than that, or links lead away."""
    root, library = image.rootfs, f"usr/lib/python{image.python}"
    folders = [f"usr/local/lib/python{image.python}/dist-packages", "usr/lib/python3/dist-packages"]
    folders = [*folders, f"{library}/dist-packages"]
    if any((root / name).is_symlink() for name in folders):
        return None
    folders = [name for name in folders if (root / name).is_dir()]
    names = [entry.name for name in folders for entry in (root / name).iterdir()]
    if any((root / name).exists() for name in ("usr/pyvenv.cfg", "usr/bin/pyvenv.cfg")):
        return None
    if any(name.endswith(".pth") or name.startswith(("sitecustomize", "apport_python_hook")) for name in names):
        return None
    if not _customizes_nothing(root, root / library / "sitecustomize.py"):
        return None
    return tuple(f"/{name}" for name in folders)


def _customizes_nothing(root: Path, file: Path) -> bool:
    """Whether ``file`` is missing, or Debian's. Its links are those of the image."""
    try:
        if file.is_symlink():
            file = root / str(file.readlink()).lstrip("/")
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return [line for line in lines if line and line[:1] != "#"] == _CUSTOMIZE.split("\n")[1:-1]
