"""Prints where compiled programs are kept from one run to the next, as a line of a shell.

The folder lies outside of the checkout and is for one user, one jaxlib, one kind of CPU and one set of flags: programs
of another are of no use, and may crash. A run passes without it. CI_COMPILE_CACHE=none turns it off.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import re
import shutil

KEEP = 3
"""Folders; those that were not used for longest go."""
LARGEST_BYTES = 2 * 2**30


def cpu() -> str:
    """Model and instruction sets."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown"
    return "".join(sorted(set(re.findall(r"^(?:model name|flags)\s*:.*", text, re.MULTILINE))))


def size(folder: pathlib.Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Prints an export of JAX_COMPILATION_CACHE_DIR, or nothing."""
    if os.environ.get("CI_COMPILE_CACHE") == "none" or cpu() == "unknown":
        return
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "scalejax-ci"
    key = [importlib.metadata.version("jaxlib"), cpu(), os.environ.get("XLA_FLAGS", "")]
    folder = home / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    home.chmod(0o700)
    if size(folder) > LARGEST_BYTES:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    os.utime(folder)
    for old in sorted(home.iterdir(), key=lambda path: -path.stat().st_mtime)[KEEP:]:
        shutil.rmtree(old)
    print(f"export JAX_COMPILATION_CACHE_DIR={folder}")


main()
